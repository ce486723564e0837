"""Conversations, of which a language model learns the assistant's messages alone."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from ringmaster.techniques.data.chat_template import ARGUMENTS, CALLS, CONTENT, REASONING, Message
from ringmaster.techniques.data.row_files import format_of
from ringmaster.techniques.data.row_kind import MEDIA
from ringmaster.techniques.data.row_source import Columns, RowSource, SampleContext
from ringmaster.techniques.data_source import DataOptions, Row, column, shown
from ringmaster.techniques.job_features import Description
from ringmaster.techniques.job_specs import DataSpec
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
WEIGHTS = (WEIGHT, "train", "training", "loss")
"""The keys of messages by which OpenAI and Mistral (weight), Axolotl (train, training) and ms-swift (loss) leave
answers out of what is learnt."""
PARTS_OF_ANSWERS = "train_detail"
"""The key of messages by which Axolotl leaves characters of an answer out of what is learnt."""
NOTHING: tuple[Any, ...] = ("", [], {})
"""What messages that call nothing may have as their calls."""
READ_KEYS = frozenset(
    {"role", CONTENT, "from", "value", CALL, CALLS, "name", "tool_call_id", PARTS_OF_ANSWERS, *WEIGHTS, *REASONING}
)
"""The keys of messages that are read, or refused."""
TEXT_PARTS = ("text", "input_text", "output_text")

OF_TEMPLATES = dict.fromkeys(
    ("documents", "chat_template_kwargs"),
    "which the chat template does not get. To fix: write its content into the messages",
)
"""Decisive columns of conversations, see `RowKind.decisive`."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(DataOptions):
    """The columns of a conversation."""

    messages_column: Annotated[
        str | None, Description("the column that holds a list of messages, such as conversation")
    ] = column("messages", "conversations")
    tools_column: Annotated[
        str | None, Description("the column that holds the tools of a conversation, such as functions")
    ] = column("tools", is_optional=True)
    system_column: str | None = column("system", "system_prompt", is_optional=True)


class ConversationSource(RowSource):
    """A kind of data whose rows may have lists of messages, and tools.

    message_roles: the roles of columns with messages, and with the tools that these call.
    """

    reads_messages = True
    message_roles: ClassVar[frozenset[str]] = frozenset({"messages", "prompt", "completion", "tools"})

    def values(self, row: Row, columns: Columns, *, spec: DataSpec) -> dict[str, Any]:
        """Returns the values by role; without the nulls that tables fill objects up with."""
        result = super().values(row, columns, spec=spec)
        if spec.path is not None and format_of(row.file, spec.format) != "parquet":
            return result
        return result | {role: without_nulls(result[role]) for role in self.message_roles & result.keys()}

    def remark(self, row: Mapping[str, Any], *, context: SampleContext) -> str | None:
        """Returns what to know of messages with keys that the chat template does not read."""
        lists = (row.get(role) for role in self.message_roles - {"tools"})
        messages = (each for value in lists if isinstance(value, list) for each in value if isinstance(each, Mapping))
        keys = {key for message in messages for key, value in message.items() if value is not None} - READ_KEYS
        unread = context.tokenizer.template.unread(keys) if keys else []
        return f"messages have keys that the chat template does not read: {shown(unread)}" if unread else None


def without_nulls(value: Any) -> Any:
    """Returns a value of an Arrow table without nulls in its objects, which lack these keys, at any depth.

    All objects of a column have all keys. Lists keep their nulls, and maps, which are lists of pairs, become objects.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(each, tuple) for each in value):
        return {key: without_nulls(item) for key, item in value}
    return [without_nulls(each) for each in value]


class Chat(ConversationSource):
    """The tokens of a conversation, rendered by the tokenizer's chat template, with labels for the assistant's.

    Messages are {"role": ..., "content": ...}, or {"from": ..., "value": ...} as in ShareGPT's files. Those of the
    assistant's whose `weight` is 0 are not learnt. Tool calls, and the row's tools, are passed to the template. A row's
    `system` is a first message, where there is none. A tokenizer that is trained on the data gets the template ChatML.
    """

    name = "chat"
    has_own_columns = True
    decisive: ClassVar[Mapping[str, str]] = {
        "functions": "which is not read. To fix: set tools_column to it",
        **OF_TEMPLATES,
        **MEDIA,
    }
    options_class = ChatOptions
    needs_tokenizer = True
    encodes_texts = False  # but the conversation that a template makes of them
    is_causal = True
    packs = True
    version = 5

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the contents of the messages."""
        messages = with_system(messages_of(row["messages"]), row["system"])
        return (message["content"] for message in messages if message.get("content"))

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, and labels for those that the assistant wrote."""
        messages = with_system(messages_of(row["messages"], roles=context.tokenizer.template.roles), row["system"])
        weights = [message.get(WEIGHT) for message in messages if message["role"] == "assistant"]
        if all(weight == 0 for weight in weights):
            what = "all messages of the assistant's have weight 0" if weights else "no message is the assistant's"
            raise ValueError(f"{what}, so there is nothing to learn. To fix: remove the row")
        tokens, written = context.tokenizer.chat(messages, tools=tools_of(row["tools"]))
        return {"input_ids": tokens, "labels": np.where(written, tokens, IGNORED)}

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns what `apply_chat_template` gives, with labels where the template marks answers; see `RowKind`."""
        messages = with_system(messages_of(row["messages"], roles=context.tokenizer.template.roles), row["system"])
        return chat_reference(messages, context, tools=tools_of(row["tools"]))


def chat_reference(
    messages: Sequence[Message], context: SampleContext, *, answer: Sequence[Message] = (), tools: Any = None
) -> dict[str, list[int]] | None:
    """Returns the tokens that `apply_chat_template` of transformers gives for a conversation, and labels.

    Labels are those of the answer or, without one, of what the template marks as the assistant's; there are none where
    it marks nothing, or where some messages are not learnt. Returns None where it refuses the messages, as it leaves
    contents without a value out, which some templates need.

    messages: as of `messages_of`. answer: the messages that follow them and are learnt.
    """
    library = context.tokenizer.by_library
    whole = library([*messages, *answer], tools=tools)
    if whole is None:
        return None
    tokens, marks = whole
    if answer:
        before = library(messages, tools=tools, add_generation_prompt=True)
        if before is None:
            return None
        marks = [False] * len(before[0]) + [True] * (len(tokens) - len(before[0]))
    if marks is None or any(message.get(WEIGHT) == 0 for message in (*messages, *answer) if not answer):
        return {"input_ids": tokens}
    return {
        "input_ids": tokens,
        "labels": [token if mark else IGNORED for token, mark in zip(tokens, marks, strict=True)],
    }


def messages_of(value: Any, *, roles: Collection[str] = ()) -> list[Message]:
    """Returns the messages of a row, each with `role` and with `content` or `tool_calls`.

    Those that are not to be learnt have the `weight` 0.

    roles: those that the chat template distinguishes, which stay as they are; others get the names in `ROLES`.

    Raises ValueError where there are none, or one of them is wrong.
    """
    if isinstance(value, str):  # as in a CSV file
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"messages are the text {value[:30]!r}. To fix: give a list of messages") from None
    if not isinstance(value, list) or not value:
        raise ValueError("messages are not a list with a message. To fix: give [{role: user, content: ...}, ...]")
    return [_message(each, number, roles) for number, each in enumerate(value, start=1)]


def _message(given: Any, number: int, roles: Collection[str]) -> Message:
    if not isinstance(given, Mapping):
        raise ValueError(f"message {number} has no role. To fix: give {{role: user, content: ...}}")
    if is_share_gpt := "from" in given and "value" in given:
        others = {key: value for key, value in given.items() if key not in ("from", "value")}
        given = {**others, "role": given["from"], CONTENT: given["value"]}
    # Tables fill up keys that other messages have with null, and recorders with calls of nothing.
    message = {key: value for key, value in given.items() if value is not None}
    message = {key: value for key, value in message.items() if key not in (CALL, CALLS) or value not in NOTHING}
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
    if not message.get(CALLS, True):
        del message[CALLS]
    if CALLS in message:
        message[CALLS] = [_with_object(call, number) for call in message[CALLS]]
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


def _with_object(call: Any, number: int) -> Mapping[str, Any]:
    """A call of a function with its arguments as an object, of which OpenAI's format has the JSON."""
    if isinstance(call, Mapping) and isinstance(inner := call.get("function"), Mapping):
        return {**call, "function": _with_object(inner, number)}
    if not isinstance(call, Mapping) or not call.get("name"):
        raise ValueError(
            f"message {number} has a tool call without the name of a function. To fix: give "
            '{"function": {"name": ..., "arguments": {...}}}'
        )
    if ARGUMENTS not in call:
        return call
    arguments = call[ARGUMENTS]
    if isinstance(arguments, str):
        parsed = _parsed(arguments)
        if isinstance(parsed, Mapping) or parsed is None:
            return {**call, ARGUMENTS: parsed or {}}
        raise ValueError(
            f"message {number} calls {call['name']} with arguments that are no JSON object: {arguments[:40]!r}. To "
            'fix: give an object, or its JSON, such as {"city": "Rome"}'
        )
    return {**call, ARGUMENTS: {}} if arguments in (None, []) else call


def _join_parts(message: dict[str, Any], number: int) -> None:
    """Makes the content of a message one text where it is a list of texts; results of tools may be any value.

    Raises ValueError where it is not text, or there is none.
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
    """The text of a part of a content; None where it is none, or has more than a text."""
    if isinstance(part, Mapping):
        has_text_alone = all(value is None for key, value in part.items() if key not in ("type", "text"))
        is_text = part.get("type") in TEXT_PARTS or (part.get("type") is None and has_text_alone)
        part = part.get("text") if is_text else None
    return part if isinstance(part, str) else None


def _weighted(message: dict[str, Any], number: int) -> Message:
    """A message with the weight 0 where it is not to be learnt, and else without a weight."""
    weights = {key: message.pop(key) for key in WEIGHTS if key in message}
    if message["role"] != "assistant":
        return message
    if message.get(PARTS_OF_ANSWERS):
        raise ValueError(
            f"message {number} has {PARTS_OF_ANSWERS}, parts that are learnt, and answers are learnt as a whole. To "
            f"fix: remove {PARTS_OF_ANSWERS} and give the message weight 1 or 0; or remove the row"
        )
    for key, weight in weights.items():
        if isinstance(weight, str) or weight not in (0, 1):
            raise ValueError(f"message {number} has the {key} {weight!r}. To fix: give 1 to learn it, or 0 not to")
    return {**message, WEIGHT: 0} if 0 in weights.values() else message


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """Returns messages behind the row's system prompt, if it has one and they do not begin with it.

    Raises ValueError where it is not text, and where they begin with another one.
    """
    if not system:
        return messages
    if not isinstance(system, str):
        raise ValueError(f"system is {type(system).__name__}, not text. To fix: give a text")
    if messages[0]["role"] in ("system", "developer"):
        if messages[0].get("content") != system:
            raise ValueError(
                "the row has a system prompt, and its messages begin with another. To fix: keep one of them"
            )
        return messages
    return [{"role": "system", "content": system}, *messages]


def tools_of(value: Any, *, what: str = "tools") -> list[Mapping[str, Any]] | None:
    """Returns the tools of a row, or what a message calls: a list or, as in TRL, its JSON; None where it has none."""
    result = _parsed(value)
    if result is not None and not (isinstance(result, list) and all(isinstance(each, Mapping) for each in result)):
        raise ValueError(
            f"{what} are {str(value)[:30]!r}. To fix: give a list of functions as JSON objects, or leave it empty"
        )
    return [_with_schema(tool, what) for tool in result] if result else None


def _with_schema(tool: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """A tool with its parameters as an object, of which some files have the JSON."""
    if isinstance(inner := tool.get("function"), Mapping):
        return {**tool, "function": _with_schema(inner, what)}
    if not isinstance(parameters := tool.get("parameters"), str):
        return tool
    if not isinstance(parsed := _parsed(parameters), Mapping):
        raise ValueError(
            f"{what} have parameters that are no JSON object: {parameters[:40]!r}. To fix: give a JSON Schema, such as "
            '{"type": "object", "properties": {...}}'
        )
    return {**tool, "parameters": parsed}


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
    tokens = context.tokenizer.answered(prompt, answer, tools=tools)
    if tokens[: len(before)] != before:
        raise ValueError(
            "the chat template renders the prompt in another way where an answer follows it. To fix: give a template "
            "that renders each message by itself"
        )
    return {"input_ids": tokens, "labels": [IGNORED] * len(before) + tokens[len(before) :]}
