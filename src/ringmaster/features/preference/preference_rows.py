"""Prompts with a chosen and a rejected answer, or with single answers that are desirable or not; and their samples."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from ringmaster.techniques.data import row_source
from ringmaster.techniques.data.chat_template import Message
from ringmaster.techniques.data.class_labels import read_number
from ringmaster.techniques.data.row_kind import LABEL, MEDIA
from ringmaster.techniques.data.sources import chat
from ringmaster.techniques.data.sources.completion import (
    BESIDE_MESSAGES,
    REPEATED,
    Completion,
    CompletionOptions,
    aligned,
    answered,
    answered_by_library,
    num_common,
    prompt_and_answer,
    prompt_with_context,
    repeats_prompt,
)
from ringmaster.techniques.data.sources.text_rows import LARGEST, filled
from ringmaster.techniques.data_source import DataOptions, PreparedData, column
from ringmaster.techniques.job_features import Description

MARGIN = "margin"
"""The entry [rows] of a batch with how much greater the reward of the chosen answer should be than the other's."""
DESIRABLE = "desirable"
"""The entry [rows] of a batch with 1 for completions that are desirable, and 0 for others."""
FLAGS = {"true": 1, "1": 1, "false": 0, "0": 0}
"""The marks of completions as they are written in files."""
ANSWERS = frozenset({"chosen", "rejected"})
"""The roles of the columns with answers."""


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(DataOptions):
    """The columns of two answers, of which one is preferred."""

    prompt_column: str | None = column("prompt", "question", "instruction", is_optional=True)
    chosen_column: Annotated[str | None, Description("the column that holds the preferred answer, such as better")] = (
        column("chosen")
    )
    rejected_column: Annotated[str | None, Description("the column that holds the other answer, such as worse")] = (
        column("rejected")
    )
    input_column: str | None = column("input", "context", is_optional=True)
    tools_column: str | None = column("tools", is_optional=True)
    system_column: str | None = column("system", is_optional=True)
    history_column: str | None = column("history", is_optional=True)


class Preference(chat.ConversationSource):
    """Two rows of tokens, [2, tokens]: the prompt with the chosen answer, and with the rejected one.

    The prompt has no labels. Prompts and answers are texts, or lists of messages, which the tokenizer's chat template
    renders with the row's `tools`. `input` and `system` are as those of completions. Without a prompt, it is the common
    beginning of `chosen` and `rejected`. Messages of the prompt that the answers repeat are left out of them.
    """

    name = "preference"
    has_own_columns = True
    message_roles = chat.ConversationSource.message_roles | ANSWERS
    usual_loss: ClassVar[str | None] = "simpo"  # which compares without a reference model
    decisive: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("context", "passage", "conversations"),
            "which is not read. To fix: set prompt_column or input_column to it, or put it into the prompt",
        ),
        **BESIDE_MESSAGES,
        **chat.OF_TEMPLATES,
        **dict.fromkeys(
            ("label", "preference", "winner"),
            "which may mark the rejected answer as the better one, and is not read. To fix: exchange both answers "
            "of such rows, and leave the column out",
        ),
        **MEDIA,
    }
    options_class: ClassVar[type[DataOptions]] = PreferenceOptions
    needs_tokenizer = True
    is_causal = True
    version = 4

    def texts(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Iterable[str]:
        """Returns the texts, also those of messages where a tokenizer is trained on them."""
        if context.spec.tokenizer is not None and all(isinstance(row[role], str) for role in ("chosen", "rejected")):
            prompt, *answers = _prompt_and_answers(row)
            return (prompt, *(prompt + answer for answer in answers)) if isinstance(prompt, str) else ()  # as encoded
        return chat.texts_of((row["prompt"], row["chosen"], row["rejected"]), context)

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the tokens and labels of both answers, the shorter one filled up."""
        return aligned(self.pair(row, context=context), context)

    def pair(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> list[dict[str, list[int]]]:
        """Returns the tokens and labels of the chosen answer, and of the rejected one. Raises as `sample`."""
        if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
            raise ValueError("chosen and rejected are of different types. To fix: give two texts, or two lists")
        if row["history"]:
            raise ValueError("a row has a history. To fix: make prompt and history messages, or remove the column")
        if row["prompt"] is None and (row["input"] or row["system"]):
            raise ValueError("an input or a system text has no prompt. To fix: set prompt_column")
        if not isinstance(row["chosen"], str):
            return _conversation_pair(row, context)
        chat.refuse_tools(row)
        for role in ("input", "system"):
            if row[role]:
                row_source.text_of(row, role)
        for role in ("chosen", "rejected"):  # without a prompt, they begin with it
            row_source.text_of(row, role, may_be_blank=row["prompt"] is not None)
        prompt, chosen, rejected = _prompt_and_answers(row)
        if not isinstance(prompt, str):
            raise ValueError("the prompt is not text, but the answers are. To fix: give three texts, or three lists")
        return answered(prompt, [chosen, rejected], context)

    def reference(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any] | None:
        """Returns the tokens of the tokenizer's own call for the prompt with each answer as one text, as in TRL."""
        if not isinstance(row["chosen"], str):
            pairs, tools = _pair_turns(row, context), chat.tools_of(row["tools"])
            given = [chat.chat_reference(prompt, context, answer=answer, tools=tools) for prompt, answer in pairs]
            samples = [each for each in given if each is not None]
            return aligned(samples, context) if len(samples) == len(given) else None
        prompt, *answers = _prompt_and_answers(row)
        tokens = [answered_by_library(prompt, answer, context) for answer in answers]
        known = [each for each in tokens if each is not None]
        return {"input_ids": filled(known, context.tokenizer.pad_id)} if len(known) == len(tokens) else None

    def remark(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> str | None:
        """Returns what to know of answers that repeat the prompt, and of messages."""
        are_repeated = all(repeats_prompt(row, role) for role in ("chosen", "rejected"))
        return REPEATED if are_repeated else super().remark(row, context=context)


def _prompt_and_answers(row: Mapping[str, Any]) -> tuple[Any, str, str]:
    """The prompt and both answers, of texts.

    Without a prompt, it is what both answers begin with, as in TRL: without a space at its end, which belongs to the
    next word. An answer that the other one begins with keeps its last character.
    """
    prompt, chosen, rejected = prompt_with_context(row), row["chosen"], row["rejected"]
    if prompt is None:
        length = num_common(chosen, rejected)
        if length == min(len(chosen), len(rejected)):
            length = max(length - 1, 0)
        elif chosen[:length].endswith(" "):
            length -= 1
        prompt = chosen[:length]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return prompt, chosen, rejected


def _conversation_pair(row: Mapping[str, Any], context: row_source.SampleContext) -> list[dict[str, list[int]]]:
    tools = chat.tools_of(row["tools"])
    return [chat.answered_chat(prompt, answer, context, tools=tools) for prompt, answer in _pair_turns(row, context)]


def _pair_turns(row: Mapping[str, Any], context: row_source.SampleContext) -> list[tuple[list[Message], list[Message]]]:
    """The messages of the prompt and of the answer, for the chosen answer and for the rejected one."""
    if row["prompt"] is None:
        roles = context.tokenizer.template.roles
        chosen, rejected = (chat.as_messages(row[key], roles=roles) for key in ("chosen", "rejected"))
        num_of_prompt = num_common(chosen, rejected)
        if not num_of_prompt:
            raise ValueError("the answers do not begin with a common prompt. To fix: add it, or set prompt_column")
        row = {**row, "prompt": chosen[:num_of_prompt]}
    return [prompt_and_answer(row, role, context) for role in ("chosen", "rejected")]


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(PreferenceOptions):
    """The columns of two answers, of which one is better."""

    margin_column: Annotated[
        str | None, Description("the column that says how much better the chosen answer is, such as score_difference")
    ] = column("margin", is_optional=True)


class Comparison(Preference):
    """Two rows of tokens, [2, tokens], as of kind preference, with their mask and the margin; 0 without one."""

    name = "comparison"
    usual_loss = "bradley-terry"
    options_class: ClassVar[type[DataOptions]] = ComparisonOptions
    is_causal = False
    copies_labels = False
    version = 1

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the tokens and the mask of both answers, the shorter one filled up, and the margin."""
        tokens = [answer["input_ids"] for answer in self.pair(row, context=context)]
        margin = 0.0 if row[MARGIN] in (None, "") else read_number(row[MARGIN])
        if not abs(margin) <= LARGEST:  # also of NaN
            raise ValueError(
                f"the margin is {row[MARGIN]!r:.40}, and not a finite number of 32 bits. To fix: correct it, or name "
                "another margin_column"
            )
        return {
            "input_ids": filled(tokens, context.tokenizer.pad_id),
            "attention_mask": filled([[1] * len(each) for each in tokens], 0),
            MARGIN: np.float32(margin),
        }

    def reference(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any] | None:
        """Returns the tokens of the tokenizer's own calls, as of kind preference."""
        known = super().reference(row, context=context)
        return None if known is None else {"input_ids": known["input_ids"]}

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description with one output."""
        return replace(prepared, num_labels=1)


@dataclass(frozen=True, kw_only=True)
class UnpairedPreferenceOptions(CompletionOptions):
    """The columns of a prompt, its completion, and the mark of the completion."""

    label_column: Annotated[
        str | None, Description("the column that says whether the completion is desirable, such as liked")
    ] = column("label")


class UnpairedPreference(Completion):
    """The tokens of a prompt and of its completion, as of kind completion, and whether the completion is desirable."""

    name = "unpaired-preference"
    options_class: ClassVar[type[DataOptions]] = UnpairedPreferenceOptions
    packs = False
    version = 1

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, labels for those of the completion, and 1 for a desirable completion, else 0."""
        flag = FLAGS.get(str(row[LABEL]).strip().lower())
        if flag is None:
            raise ValueError(
                f"the label is {row[LABEL]!r:.40}, and neither true nor false. To fix: say whether the completion is "
                "desirable, name another label_column, or set data.kind to completion and data.ignored_columns to "
                "[label]"
            )
        return {**super().sample(row, context=context), DESIRABLE: np.int64(flag)}
