"""A tokenizer's chat template: the text that it makes of a conversation, what it leaves out, and what ends an answer.

What a template does with a part of a message shows where the part is replaced by a mark, a text that occurs nowhere
else: the part is rendered if and only if its mark is in the result.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.errors import DataError
from ringmaster.techniques.models.model_folders import read_json

Message = Mapping[str, Any]

CALLS = "tool_calls"
CONTENT = "content"
ARGUMENTS = "arguments"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys of messages for what a model thinks before it answers."""
REASONING_END = "</think>"
"""What ends the reasoning within a content, before the answer."""
ANSWER = "assistant"

# Comparisons of a role with names, such as `message['role'] == 'tool'` and `message.role in ["tool", "ipython"]`.
_ROLE_TESTS = re.compile(r"""role['"]?\]?\s*(?:[!=]=\s*(['"][\w-]+['"])|(?:not\s+)?in\s*[\[(]([^\])]*)[\])])""")
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")

MAX_STRUCTURES = 10_000
"""Of how many structures of conversations it is remembered what a template leaves out."""
OTHER_TEMPLATE = "set data.tokenizer to one whose template renders"


class Remark(IntFlag):
    """Remarks on a row: that a conversation of it was rendered, has a special token in a message, and lost
    the reasoning of an answer that is not learnt."""

    RENDERED, SPECIAL, SHORTENED = 1, 2, 4


@dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """What a chat template writes behind an answer, by which a model ends it.

    token_ids: the tokens that end an answer, of those that are found as they are written, such as <|im_end|>.
    text: what ends it where the template writes no such token there; "" for white space alone.
    prompt_end: the last tokens of prompts that are conversations, for such a text.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    prompt_end: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A part of a conversation that is not in its rendering. turn: its message; None for the tools."""

    what: str
    turn: int | None = None


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a template takes a message with tool calls.

    are_texts: whether it takes arguments as JSON texts, and not as objects.
    content: the message's content where it has none; () for a message without the key.
    """

    are_texts: bool = False
    content: tuple[str | None, ...] = ()


CALL_FORMS = tuple(
    CallForm(are_texts=are_texts, content=content) for are_texts in (False, True) for content in ((), (None,), ("",))
)


class ChatTemplate:
    """The chat template of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)  # as templates read them
        self._left_out: dict[str, tuple[LeftOut, ...]] = {}

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles of messages that it distinguishes by name."""
        tests = _ROLE_TESTS.findall(self._source)
        return frozenset(name for result in tests for name in re.findall(r"[\w-]+", " ".join(result)))

    @cached_property
    def _source(self) -> str:
        """Its text; that of all, where a tokenizer has several."""
        template = self._tokenizer.chat_template or ""
        return " ".join(template.values()) if isinstance(template, dict) else str(template)

    def unread(self, keys: Collection[str]) -> list[str]:
        """Returns those of some keys of messages that it does not name."""
        return sorted(key for key in keys if key not in self._source)

    def marks_answers(self, tools: Any) -> bool:
        """Returns whether it marks what the assistant wrote, by {% generation %}."""
        return _MARKS_ANSWERS.search(self._tokenizer.get_chat_template(None, tools)) is not None

    def rendered(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        finds_answers: bool = False,
        is_formed: bool = False,
    ) -> tuple[str, list[range] | None]:
        """Returns a conversation as text; with `finds_answers` also the parts that the template marks as answers.

        These are None where the template marks nothing at all.

        is_formed: whether messages are in the form that the template takes, see `formed`.

        Raises ValueError where the template refuses the messages, and DataError where there is none.
        """
        if self._tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template. To fix: set data.tokenizer to one that has, such as that of an "
                "instruction-tuned model"
            )
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(None, tools)
        finds_answers = finds_answers and self.marks_answers(tools)
        try:
            rendered, result = render_jinja_template(
                conversations=[list(messages if is_formed else self.formed(messages))],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=finds_answers,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (TemplateError, TypeError) as error:  # such as a content that is a list, where a text is expected
            raise ValueError(
                f"the chat template refuses the messages: {error}. To fix: correct the messages"
            ) from error
        if not finds_answers:
            return rendered[0], None
        spans = [range(first, end) for first, end in result[0] if first < end]
        if not spans:
            raise ValueError(
                "the chat template marks nothing of the messages as the assistant's, so there is nothing to learn. "
                "To fix: remove the row, or correct its {% generation %}"
            )
        return rendered[0], spans

    # The form of messages

    def formed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns messages with their contents and tool calls as the template takes them."""
        if any(message.get(CALLS) for message in messages):
            messages = [_in_form(message, self._call_form) for message in messages]
        return _in_parts(messages, self._roles_in_parts) if self._roles_in_parts else messages

    @cached_property
    def _roles_in_parts(self) -> frozenset[str]:
        """The roles whose contents the template renders as lists of parts alone, as some of images and texts do."""
        user, result = {"role": "user", CONTENT: _mark(1)}, frozenset[str]()
        for role in ("user", "system", ANSWER):
            message = {"role": role, CONTENT: _mark(0)}
            messages = {"user": [message], "system": [message, user], ANSWER: [user, message]}[role]
            if not self._renders(messages, result) and self._renders(messages, result | {role}):
                result |= {role}
        return result

    def _renders(self, messages: Sequence[Message], roles_in_parts: frozenset[str]) -> bool:
        """Whether the first mark is rendered where the contents of some roles are lists of parts."""
        try:
            text, _ = self.rendered(_in_parts(messages, roles_in_parts), is_formed=True)
        except ValueError:
            return False
        return _mark(0) in text.casefold()

    @cached_property
    def _call_form(self) -> CallForm:
        """The first form in which the template renders the arguments of a call as JSON, as most take objects."""
        name, value = _mark(0), _mark(1)
        for form in CALL_FORMS:
            try:
                messages = _in_parts(_calling(name, value), self._roles_in_parts)
                messages = [_in_form(message, form) for message in messages]
                text, _ = self.rendered(messages, tools=_tools(name), is_formed=True)
            except ValueError:
                continue
            # Python shows an object with single quotes, and JSON a text with escaped ones.
            lower, wrong = text.casefold(), (f"'{name}': '{value}'", f'\\"{value}')
            if value in lower and "None" not in text and not any(each in lower for each in wrong):
                return form
        return CALL_FORMS[0]

    # What is left out

    def check(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Any,
        *,
        learnt: Collection[int],
        add_generation_prompt: bool = False,
    ) -> bool:
        """Raises ValueError where a part of a conversation is not in its rendering, with its message.

        The reasoning of an answer that is not learnt may be left out, as templates of reasoning models do with earlier
        answers.

        text: the rendering. learnt: the messages that are learnt.

        Returns whether the reasoning of an answer was left out.
        """
        left_out = [*self._left_out_of(messages, tools, add_generation_prompt), *_contents_left_out(text, messages)]
        for each in left_out:
            if each.turn in learnt or each.what not in REASONING:
                raise ValueError(_fault(each, messages))
        return bool(left_out)

    def _left_out_of(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> tuple[LeftOut, ...]:
        """What is left out of all conversations with the structure of this one: they differ in their texts alone."""
        marking = _Marking()
        marked, marked_tools = marking.messages(messages), marking.tools(tools)
        key = json.dumps([marked, marked_tools, add_generation_prompt], default=str)
        known = self._left_out.get(key)
        if known is not None:
            return known
        try:
            text, _ = self.rendered(marked, tools=marked_tools, add_generation_prompt=add_generation_prompt)
        except ValueError:  # it reads some of the texts: what is left out of these is found by the texts themselves
            text = None
        lower = None if text is None else text.casefold()
        result = () if lower is None else tuple(each for mark, each in marking.parts.items() if mark not in lower)
        if len(self._left_out) >= MAX_STRUCTURES:
            self._left_out.clear()
        self._left_out[key] = result
        return result

    def has_special(self, messages: Sequence[Message]) -> bool:
        """Returns whether a special token is written in a content or in reasoning."""
        texts = (message.get(key) for message in messages for key in (CONTENT, *REASONING))
        return any(isinstance(text, str) and self._special.search(text) for text in texts)

    def notes(self, remarks: NDArray[np.uint8]) -> Iterator[str]:
        """Yields what users should know of rows with these remarks, [rows]."""
        if num_special := int(np.count_nonzero(remarks & Remark.SPECIAL)):
            yield f"{num_special:,} rows have special tokens in messages, which are special as in apply_chat_template"
        if num_shortened := int(np.count_nonzero(remarks & Remark.SHORTENED)):
            yield f"in {num_shortened:,} rows the chat template leaves out reasoning of answers that are not learnt"
        if not (remarks & Remark.RENDERED).any() or self.turn_end.token_ids:
            return
        if not (text := self.turn_end.text):
            yield "the chat template writes nothing behind answers, so that no model learns to end them"
        else:
            yield f"the chat template ends answers with {text!r}, so give generate stop_strings=[{text!r}]"

    # The end of an answer

    @cached_property
    def turn_end(self) -> TurnEnd:
        """What ends an answer: what is rendered behind it, in the same way whether a message follows it or not."""
        if self._tokenizer.chat_template is None:
            return TurnEnd()
        question, first, last, name = {"role": "user", CONTENT: _mark(2)}, _mark(0), _mark(1), _mark(3)
        result = {"role": "tool", "name": name, "tool_call_id": CALL_ID, CONTENT: _mark(4)}
        text = self._end_behind([last], [question, {"role": ANSWER, CONTENT: last}], question, tools=None)
        # Text that is also between two calls ends neither. Some templates render one call alone.
        calls = self._end_behind([first, last], _calling(name, first, last), result, tools=_tools(name))
        if calls is None:
            calls = self._end_behind([last], _calling(name, last), result, tools=_tools(name))
        ends = [end for end in (text, calls) if end is not None]
        token_ids = tuple(dict.fromkeys(token for end in ends for token in end.token_ids))
        if token_ids or text is None or not text.text:
            return TurnEnd(token_ids=token_ids)
        questions = ([{**question, CONTENT: f"{question[CONTENT]}{letter}"}] for letter in "ab")
        prompts = [self._studied(each, add_generation_prompt=True) for each in questions]
        one, other = (self._tokenizer(each, add_special_tokens=False)["input_ids"][::-1] for each in prompts)
        common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
        return replace(text, prompt_end=tuple(common[::-1]))

    def _end_behind(
        self, marks: Sequence[str], messages: Sequence[Message], follower: Message, *, tools: Any
    ) -> TurnEnd | None:
        """What is written behind the last of some marks, which an answer has; None where it is not rendered."""
        try:
            last, between = self._pieces_behind(marks, messages, tools)
        except ValueError:
            return None
        try:
            earlier, _ = self._pieces_behind(marks, [*messages, follower], tools)
        except ValueError:
            earlier = last
        # What differs begins the next message, or ends the whole.
        common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, earlier, strict=False))]
        for pieces in (common, last):
            if ends := [piece for piece in pieces if piece in self._added and piece not in between]:
                return TurnEnd(token_ids=(self._added[ends[-1]],))
        return TurnEnd(text="".join(last).strip())

    def _studied(self, messages: Sequence[Message], **settings: Any) -> str:
        """A conversation as text, for the study of the template; behind a system prompt where the template needs one.

        Raises ValueError where the template refuses both.
        """
        try:
            return self.rendered(messages, **settings)[0]
        except ValueError:
            return self.rendered([{"role": "system", CONTENT: _mark(5)}, *messages], **settings)[0]

    def _pieces_behind(self, marks: Sequence[str], messages: Sequence[Message], tools: Any) -> tuple[list[str], str]:
        """The text behind the last mark, divided at added tokens, and the text from the first mark to the last.

        Raises ValueError where they are not rendered.
        """
        text = self._studied(messages, tools=tools)
        first, last = ([*re.finditer(mark, text, re.IGNORECASE)] for mark in (marks[0], marks[-1]))
        if not first or not last:
            raise ValueError(f"the chat template does not render {marks[-1]}")
        between = text[first[-1].end() : last[-1].start()]
        return [piece for piece in self._added_tokens.split(text[last[-1].end() :]) if piece], between

    @cached_property
    def _added(self) -> dict[str, int]:
        """The tokens that are found as they are written, and their numbers; without white space, such as line ends."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True)
        every = {**{str(token): int(number) for number, token in added.items()}, **dict(special)}
        return {token: number for token, number in every.items() if token and not token.isspace()}

    @cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        return _any_of(self._added)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return _any_of({*self._tokenizer.all_special_tokens, *(str(token) for token in added if token.special)})


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """An expression that finds texts, the longest of those that begin at one place, as a group."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True))) or '(?!)'})")


CALL_ID = "qzx000000"  # nine letters and digits, as Mistral's templates want them


def _mark(number: int) -> str:
    """A text of letters and digits that occurs nowhere else, whatever a template does with letters and spaces."""
    return f"qzx{number}xzq"


def _calling(name: str, *values: str) -> list[Message]:
    """A conversation with calls of a function, each with a value, for the study of templates."""
    functions = [{"name": name, ARGUMENTS: {name: value}} for value in values]
    calls = [{"id": CALL_ID, "type": "function", "function": function} for function in functions]
    return [{"role": "user", CONTENT: _mark(2)}, {"role": ANSWER, CALLS: calls}]


def _tools(name: str) -> list[Mapping[str, Any]]:
    parameters = {"type": "object", "properties": {name: {"type": "string", "description": name}}, "required": [name]}
    return [{"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}]


def _in_form(message: Message, form: CallForm) -> Message:
    """A message with its tool calls as a template takes them."""
    if not message.get(CALLS):
        return message
    content = {CONTENT: form.content[0]} if form.content and not message.get(CONTENT) else {}
    calls = [_call_in_form(call) for call in message[CALLS]] if form.are_texts else message[CALLS]
    return {**message, **content, CALLS: calls}


def _in_parts(messages: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """Messages whose contents are lists of parts where they are texts of some roles."""
    return [
        {**message, CONTENT: [{"type": "text", "text": message[CONTENT]}]}
        if message["role"] in roles and isinstance(message.get(CONTENT), str)
        else message
        for message in messages
    ]


def _call_in_form(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(inner := call.get("function"), Mapping):
        return {**call, "function": _call_in_form(inner)}
    is_object = isinstance(call.get(ARGUMENTS), Mapping)
    return {**call, ARGUMENTS: json.dumps(call[ARGUMENTS], ensure_ascii=False)} if is_object else call


@dataclass
class _Marking:
    """Replaces the texts and numbers of conversations by marks. parts: what each mark represents."""

    parts: dict[str, LeftOut] = field(default_factory=dict)

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        return [self._message(turn, message) for turn, message in enumerate(messages)]

    def tools(self, tools: Any) -> Any:
        part = LeftOut(what="tools")
        return tools and [self._function(tool, part, ("name", "description")) for tool in tools]

    def _message(self, turn: int, message: Message) -> Message:
        # The name of a tool's result is that of the call, and which call it is.
        names = ("name",) if message["role"] != "tool" else ()
        marked = {
            key: self._marked(message[key], LeftOut(what=key, turn=turn))
            for key in (CONTENT, *REASONING, *names)
            if key in message
        }
        if message.get(CALLS):
            part = LeftOut(what=CALLS, turn=turn)
            marked[CALLS] = [self._function(call, part, ("name", ARGUMENTS)) for call in message[CALLS]]
        return {**message, **marked}

    def _function(self, value: Mapping[str, Any], part: LeftOut, keys: Sequence[str]) -> Mapping[str, Any]:
        """A tool, or a call of one, with what is under some keys replaced."""
        if isinstance(inner := value.get("function"), Mapping):
            return {**value, "function": self._function(inner, part, keys)}
        return {**value, **{key: self._marked(value[key], part) for key in keys if key in value}}

    def _marked(self, value: Any, part: LeftOut) -> Any:
        if isinstance(value, Mapping):
            return {key: item if key == "type" else self._marked(item, part) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(each, part) for each in value]
        if value is None or isinstance(value, bool) or (isinstance(value, str) and not value.strip()):
            return value
        is_text = isinstance(value, str)
        mark = _mark(10 + len(self.parts)) if is_text else str(731_000_000 + len(self.parts))
        self.parts[mark] = part
        return mark if is_text else int(mark)


def _contents_left_out(text: str, messages: Sequence[Message]) -> Iterator[LeftOut]:
    """Yields the contents that are not in a rendering, white space and case aside, as where a template reads them."""
    squeezed = ""

    def holds(part: str) -> bool:
        nonlocal squeezed
        if part.strip() in text:
            return True
        squeezed = squeezed or _squeezed(text)
        forms = (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1])
        return any(_squeezed(form) in squeezed for form in forms)

    for turn, message in enumerate(messages):
        content = message.get(CONTENT)
        if not isinstance(content, str) or holds(content):
            continue
        reasoning, is_reasoned, answer = content.rpartition(REASONING_END)
        if not is_reasoned or not holds(answer):
            yield LeftOut(what=CONTENT, turn=turn)
        elif not holds(reasoning.strip().removeprefix("<think>")):
            yield LeftOut(what=REASONING[0], turn=turn)


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()


def _fault(left_out: LeftOut, messages: Sequence[Message]) -> str:
    """What is wrong where a part is left out, and how to mend it."""
    what, turn = left_out.what, left_out.turn
    if turn is None or what == CALLS:
        return f"the chat template ignores {what}. To fix: {OTHER_TEMPLATE} them, or remove them"
    role, place = messages[turn]["role"], f"message {turn + 1}"
    problem = f"the chat template leaves out the {what} of {place} ({role})"
    if what in REASONING:
        return (
            f"{problem}, which is learnt. To fix: {OTHER_TEMPLATE} it; or give one conversation a row for each answer, "
            "or its message weight 0"
        )
    if what == "name":
        return f"{problem}. To fix: {OTHER_TEMPLATE} it, write it into the content, or remove it"
    if role == "system":
        return f"{problem}. To fix: {OTHER_TEMPLATE} it, write it into a message of the user's, or remove it"
    return f"{problem}, or a part of it. To fix: {OTHER_TEMPLATE} it, or remove the row"


def turn_end_of(folder: Path) -> TurnEnd:
    """Returns what ends an answer by the chat template of the tokenizer in a folder, which may have none."""
    is_in_file = any(folder.glob("*chat_template*"))
    if not is_in_file and not read_json(folder / "tokenizer_config.json").get("chat_template"):
        return TurnEnd()
    from transformers import AutoTokenizer

    return ChatTemplate(AutoTokenizer.from_pretrained(str(folder), local_files_only=True)).turn_end
