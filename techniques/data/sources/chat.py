"""Conversations, of which a language model learns the assistant's messages alone."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmaster.techniques.data.row_source import RowSource, SampleContext
from ringmaster.techniques.data.row_tokenizer import CALLS, Message
from ringmaster.techniques.data_source import DataOptions, column
from ringmaster.techniques.metric import IGNORED

CALL = "function_call"
"""The role of a message with a call of a function, as JSON with `name` and `arguments`, in ShareGPT's format; and the
key of a call in OpenAI's former one."""
ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "ai", "model", CALL), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
    "developer": "system",
}
"""The roles of messages by the names that formats of data have for them, in lower case."""
WEIGHT = "weight"
WEIGHTS = (WEIGHT, "train")
"""The keys of messages by which OpenAI, Mistral (weight) and Axolotl (train) leave answers out of what is learnt."""
TEXT_PARTS = (None, "text", "input_text", "output_text")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(DataOptions):
    """The columns of a conversation."""

    messages_column: str | None = column("messages", "conversations")
    tools_column: str | None = column("tools", is_optional=True)
    system_column: str | None = column("system", is_optional=True)


class Chat(RowSource):
    """The tokens of a conversation, rendered by the tokenizer's chat template, with labels for the assistant's.

    Messages are {"role": ..., "content": ...}, or {"from": ..., "value": ...} as in ShareGPT's files. Those of the
    assistant's whose `weight` is 0 are not learnt. Tool calls, and the row's tools, are passed to the template. A row's
    `system` is a first message, where there is none. A tokenizer that is trained on the data gets the template ChatML.
    """

    name = "chat"
    options_class = ChatOptions
    needs_tokenizer = True
    reads_messages = True
    encodes_texts = False  # but the conversation that a template makes of them
    is_causal = True
    packs = True
    version = 3

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the contents of the messages."""
        messages = with_system(messages_of(row["messages"]), row["system"])
        return (message["content"] for message in messages if message.get("content"))

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, and labels for those that the assistant wrote."""
        messages = with_system(messages_of(row["messages"], roles=context.tokenizer.roles), row["system"])
        weights = [message.get(WEIGHT) for message in messages if message["role"] == "assistant"]
        if all(weight == 0 for weight in weights):
            what = "all messages of the assistant's have weight 0" if weights else "no message is the assistant's"
            raise ValueError(f"{what}, so there is nothing to learn. To fix: remove the row")
        tokens, written = context.tokenizer.chat(messages, tools=tools_of(row["tools"]))
        return {"input_ids": tokens, "labels": np.where(written, tokens, IGNORED)}


def messages_of(value: Any, *, roles: Collection[str] = ()) -> list[Message]:
    """Returns the messages of a row, each with `role` and with `content` or `tool_calls`.

    Those that are not to be learnt have the `weight` 0.

    roles: those that the chat template tells apart, which stay as they are; others get the names in `ROLES`.

    Raises ValueError where there are none, or one of them is wrong.
    """
    if isinstance(value, str):  # as in a CSV file
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"messages are the text {value[:30]!r}. To fix: give a list of messages") from None
    if not isinstance(value, list) or not value:
        raise ValueError("messages are no list with a message. To fix: give [{role: user, content: ...}, ...]")
    return [_message(each, number, roles) for number, each in enumerate(value, start=1)]


def _message(given: Any, number: int, roles: Collection[str]) -> Message:
    if not isinstance(given, Mapping):
        raise ValueError(f"message {number} has no role. To fix: give {{role: user, content: ...}}")
    if is_share_gpt := "from" in given and "value" in given:
        given = {"role": given["from"], "content": given["value"], **{key: given.get(key) for key in WEIGHTS}}
    # Tables fill up keys that other messages have with null.
    message = {key: value for key, value in given.items() if value is not None}
    name = message.get("role")
    if not isinstance(name, str):
        raise ValueError(f"message {number} has no role. To fix: give {{role: user, content: ...}}")
    if is_share_gpt or name not in roles:
        if (known := ROLES.get(name.strip().lower())) is None:
            known_names = ", ".join(dict.fromkeys((*ROLES, *sorted(roles))))
            raise ValueError(f"message {number} is from {name!r}. To fix: give one of {known_names}")
        message["role"] = known
    if name == CALL:
        message[CALL] = message.pop("content", None)
    if CALLS in message and not isinstance(message[CALLS], list):
        message[CALLS] = tools_of(message[CALLS], what=f"message {number}: tool_calls") or []
    if CALL in message and CALLS not in message:
        message[CALLS] = [{"type": "function", "function": call} for call in _calls(message.pop(CALL), number)]
    _join_parts(message, number)
    return _weighted(message, number)


def _parsed(value: Any) -> Any:
    """What a text holds as JSON, as in a table; None of a blank one, and other values as they are."""
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):  # refused as a text
            return json.loads(value) if value.strip() else None
    return value


def _calls(value: Any, number: int) -> list[Any]:
    """The calls of functions that a message has, as JSON or as they are."""
    parsed = _parsed(value)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise ValueError(f'message {number} is not a {CALL}. To fix: give JSON, {{"name": ..., "arguments": {{...}}}}')
    return calls


def _join_parts(message: dict[str, Any], number: int) -> None:
    """Makes the content of a message one text where it is a list of texts; results of tools may be any value.

    Raises ValueError where it is no text, or there is none.
    """
    content = message.get("content")
    if content in (None, []) and not message.get(CALLS):
        raise ValueError(f"message {number} has neither content nor tool_calls. To fix: add one, or remove it")
    if content is None or isinstance(content, str):
        return
    parts = [_text_of_part(part) for part in content] if isinstance(content, list) else [None]
    if None not in parts:
        message["content"] = "".join(str(part) for part in parts)
    elif message["role"] != "tool":
        what = f"a content that is {type(content).__name__}"
        if isinstance(content, list):
            part = content[parts.index(None)]
            what = f"a part of type {repr(part.get('type')) if isinstance(part, Mapping) else type(part).__name__}"
        raise ValueError(f"message {number} has {what}, and only text is read. To fix: give a text, or remove the row")


def _text_of_part(part: Any) -> str | None:
    """The text of a part of a content; None where it is none."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS else part
    return text if isinstance(text, str) else None


def _weighted(message: dict[str, Any], number: int) -> Message:
    """A message with the weight 0 where it is not to be learnt, and else without a weight."""
    weights = {key: message.pop(key) for key in WEIGHTS if key in message}
    if message["role"] != "assistant":
        return message
    for key, weight in weights.items():
        if isinstance(weight, str) or weight not in (0, 1):
            raise ValueError(f"message {number} has the {key} {weight!r}. To fix: give 1 to learn it, or 0 not to")
    return {**message, WEIGHT: 0} if 0 in weights.values() else message


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """Returns messages behind the row's system prompt, if it has one and they do not begin with another."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    if not isinstance(system, str):
        raise ValueError(f"system is {type(system).__name__}, not text. To fix: give a text")
    return [{"role": "system", "content": system}, *messages]


def tools_of(value: Any, *, what: str = "tools") -> list[Mapping[str, Any]] | None:
    """Returns the tools of a row, or what a message calls: a list or, as in TRL, its JSON; None where it has none."""
    result = _parsed(value)
    if result is not None and not (isinstance(result, list) and all(isinstance(each, Mapping) for each in result)):
        raise ValueError(
            f"{what} are {str(value)[:30]!r}. To fix: give a list of functions as JSON objects, or leave it empty"
        )
    return result or None


def refuse_tools(row: Mapping[str, Any]) -> None:
    """Raises ValueError where a row of texts has tools, which only chat templates render."""
    if tools_of(row["tools"]):
        raise ValueError("a row of texts has tools. To fix: give lists of messages, which the chat template renders")


def texts_of(values: Iterable[Any], context: SampleContext) -> list[str]:
    """Returns the texts among values, which are texts or lists of messages.

    The texts of messages are left out where they are not encoded by themselves, but as part of a rendered conversation.
    """
    given = [value for value in values if value is not None]
    if not any(isinstance(value, list) for value in given):
        return [value for value in given if isinstance(value, str)]
    if context.spec.tokenizer is not None:
        return []
    return [message["content"] for value in given for message in as_messages(value) if message.get("content")]


def as_messages(value: Any, *, roles: Collection[str] = ()) -> list[Message]:
    """Returns the messages of a row, see `messages_of`; a text is one message of the user's."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else messages_of(value, roles=roles)


def answered_chat(
    prompt: Sequence[Message], answer: Sequence[Message], context: SampleContext, *, tools: Any = None
) -> dict[str, list[int]]:
    """Returns the tokens of a conversation, with labels for those of its last messages, the answer.

    Raises ValueError where the chat template renders the prompt in another way once the answer follows, or where a part
    of the answer is not to be learnt.
    """
    if any(message.get(WEIGHT) == 0 for message in answer):
        raise ValueError(
            "an answer has a message of weight 0. To fix: move it into the prompt, or give conversations of kind chat"
        )
    before = context.tokenizer.prompt(prompt, tools=tools)
    tokens = context.tokenizer.chat([*prompt, *answer], tools=tools)[0].tolist()
    if tokens[: len(before)] != before:
        raise ValueError(
            "the chat template renders the prompt in another way where an answer follows it. To fix: give a template "
            "that renders each message by itself"
        )
    return {"input_ids": tokens, "labels": [IGNORED] * len(before) + tokens[len(before) :]}
