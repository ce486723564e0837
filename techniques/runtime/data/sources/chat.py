"""Conversations, of which a language model learns the assistant's messages alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.runtime.data.row_samples.tokenizer import Message, give_chat_template

CALL = "function_call"
"""The role of a message with a call of a function, as JSON with `name` and `arguments`, in ShareGPT's format."""
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    CALL: "assistant",
    **{name: name for name in ("system", "user", "assistant", "tool")},
}
"""The roles of messages by their names in ShareGPT's format."""


class Chat(RowSource):
    """The tokens of a conversation, rendered by the tokenizer's chat template, with labels for the assistant's.

    Messages are {"role": ..., "content": ...}, or {"from": ..., "value": ...} as in ShareGPT's files. Tool calls, and
    the row's tools, are passed to the template. A row's `system` is a first message, where there is none. A tokenizer
    that is trained on the data gets the template ChatML.
    """

    name = "chat"
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "messages": ("messages", "conversations"),
        "tools": ("tools",),
        "system": ("system",),
    }
    optional: ClassVar[frozenset[str]] = frozenset({"tools", "system"})
    needs_tokenizer = True
    encodes_texts = False  # but the conversation that a template makes of them
    is_causal = True
    packs = True
    version = 2

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the contents of the messages."""
        messages = with_system(messages_of(row["messages"]), row["system"])
        return (message["content"] for message in messages if message.get("content"))

    def prepare_tokenizer(self, folder: Path, *, is_trained: bool) -> None:
        """Gives a tokenizer that was trained on the data a chat template."""
        if is_trained:
            give_chat_template(folder)

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, and labels for those that the assistant wrote."""
        messages = with_system(messages_of(row["messages"]), row["system"])
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message is the assistant's, so there is nothing to learn. To fix: remove the row")
        tokens, written = context.tokenizer.chat(messages, tools=tools_of(row["tools"]))
        return {"input_ids": tokens, "labels": np.where(written, tokens, IGNORED)}


def messages_of(value: Any) -> list[Message]:
    """Returns the messages of a row, each with `role` and `content`. Raises ValueError where they are none."""
    if isinstance(value, str):  # as in a CSV file
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"messages are the text {value[:30]!r}. To fix: give a list of messages") from None
    if not isinstance(value, list) or not value:
        raise ValueError("messages are no list with a message. To fix: give [{role: user, content: ...}, ...]")
    found: list[Message] = []
    for number, message in enumerate(value, start=1):
        if isinstance(message, Mapping) and "from" in message and "value" in message:
            message = _of_share_gpt(message, number)
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role. To fix: give {{role: user, content: ...}}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"message {number} has neither content nor tool_calls. To fix: add one, or remove it")
        # Tables fill up keys that other messages have with null.
        is_filled = None in message.values()
        found.append({key: item for key, item in message.items() if item is not None} if is_filled else message)
    return found


def _of_share_gpt(message: Mapping[str, Any], number: int) -> Message:
    name, value = message["from"], message["value"]
    if name not in ROLES:
        raise ValueError(f"message {number} is from {name!r}. To fix: give one of {', '.join(ROLES)}")
    if name != CALL:
        return {"role": ROLES[name], "content": value}
    try:
        said = json.loads(value)
    except (TypeError, json.JSONDecodeError):
        said = None
    calls = said if isinstance(said, list) else [said]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise ValueError(f'message {number} is no {CALL}. To fix: give JSON, {{"name": ..., "arguments": {{...}}}}')
    return {"role": ROLES[name], "tool_calls": [{"type": "function", "function": call} for call in calls]}


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """Returns messages behind the row's system prompt, if it has one and they do not begin with another."""
    if not system or messages[0]["role"] == "system":
        return messages
    if not isinstance(system, str):
        raise ValueError(f"system is {type(system).__name__}, not text. To fix: give a text")
    return [{"role": "system", "content": system}, *messages]


def tools_of(value: Any) -> list[Mapping[str, Any]] | None:
    """Returns the tools of a row, which are a list or, as in TRL, its JSON; None where it has none."""
    tools = value
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):  # refused as a text
            tools = json.loads(value) if value.strip() else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(
            f"tools are {str(value)[:30]!r}. To fix: give a list of functions as JSON schemas, or leave it empty"
        )
    return tools or None


def refuse_tools(row: Mapping[str, Any]) -> None:
    """Raises ValueError where a row of texts has tools, which only chat templates render."""
    if tools_of(row["tools"]):
        raise ValueError("a row of texts has tools. To fix: give lists of messages, which the chat template renders")


def texts_of(values: Iterable[Any], *, spec: DataSpec) -> list[str]:
    """Returns the texts among values, which are texts or lists of messages.

    The texts of messages are left out where they are not encoded by themselves, but as part of a rendered conversation.
    """
    given = [value for value in values if value is not None]
    if not any(isinstance(value, list) for value in given):
        return [value for value in given if isinstance(value, str)]
    if spec.tokenizer is not None:
        return []
    return [message["content"] for value in given for message in as_messages(value) if message.get("content")]


def as_messages(value: Any) -> list[Message]:
    """Returns the messages of a row; a text is one message of the user's."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else messages_of(value)


def answered_chat(
    prompt: Sequence[Message], answer: Sequence[Message], context: SampleContext, *, tools: Any = None
) -> dict[str, list[int]]:
    """Returns the tokens of a conversation, with labels for those of its last messages, the answer.

    Raises ValueError where the chat template renders the prompt in another way once the answer follows.
    """
    before = context.tokenizer.prompt(prompt, tools=tools)
    tokens = context.tokenizer.chat([*prompt, *answer], tools=tools)[0].tolist()
    if tokens[: len(before)] != before:
        raise ValueError(
            "the chat template renders the prompt in another way where an answer follows it. To fix: give a template "
            "that renders each message by itself"
        )
    return {"input_ids": tokens, "labels": [IGNORED] * len(before) + tokens[len(before) :]}
