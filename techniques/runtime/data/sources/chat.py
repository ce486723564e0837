"""Conversations, of which a language model learns the assistant's messages alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.runtime.data.row_samples.tokenizer import Message, give_chat_template

# The names of ShareGPT's format.
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


class Chat(RowSource):
    """The tokens of a conversation, rendered by the tokenizer's chat template, with labels for the assistant's.

    Messages are {"role": ..., "content": ...}, or {"from": ..., "value": ...} as in ShareGPT's files. Tool calls, and
    the row's tools, are passed to the template. A tokenizer that is trained on the data gets the template ChatML.
    """

    name = "chat"
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {"messages": ("messages", "conversations"), "tools": ("tools",)}
    optional: ClassVar[frozenset[str]] = frozenset({"tools"})
    needs_tokenizer = True
    encodes_texts = False  # but the conversation that a template makes of them
    is_causal = True
    packs = True
    version = 2

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the contents of the messages."""
        return (message["content"] for message in messages_of(row["messages"]) if message.get("content"))

    def prepare_tokenizer(self, folder: Path, *, is_trained: bool) -> None:
        """Gives a tokenizer that was trained on the data a chat template."""
        if is_trained:
            give_chat_template(folder)

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, and labels for those that the assistant wrote."""
        messages = messages_of(row["messages"])
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message is the assistant's, so there is nothing to learn. To fix: remove the row")
        tools = json.loads(row["tools"]) if isinstance(row["tools"], str) else row["tools"]
        tokens, written = context.tokenizer.chat(messages, tools=tools)
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
            message = {"role": ROLES.get(message["from"], message["from"]), "content": message["value"]}
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role. To fix: give {{role: user, content: ...}}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"message {number} has neither content nor tool_calls. To fix: add one, or remove it")
        # Tables fill up keys that other messages have with null.
        found.append({key: item for key, item in message.items() if item is not None})
    return found


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
