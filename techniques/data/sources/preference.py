"""Prompts with a chosen and a rejected answer, from which a language model learns what people prefer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ringmaster.techniques.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.data.row_samples.tokenizer import give_chat_template
from ringmaster.techniques.data.sources.chat import answered_chat, as_messages, refuse_tools, texts_of, tools_of
from ringmaster.techniques.data.sources.completion import answered, num_common
from ringmaster.techniques.data.training_faults import are_pairs_equal
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED


class Preference(RowSource):
    """Two rows of tokens, [2, tokens]: the prompt with the chosen answer, and with the rejected one.

    The prompt has no labels. Prompts and answers are texts, or lists of messages, which the tokenizer's chat template
    renders with the row's `tools`. Without a prompt, it is the common beginning of `chosen` and `rejected`.
    """

    name = "preference"
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prompt": ("prompt", "question"),
        "chosen": ("chosen",),
        "rejected": ("rejected",),
        "tools": ("tools",),
    }
    optional: ClassVar[frozenset[str]] = frozenset({"prompt", "tools"})
    needs_tokenizer = True
    is_causal = True
    version = 3

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the texts, also those of messages where a tokenizer is trained on them."""
        if spec.tokenizer is not None and all(isinstance(row[role], str) for role in ("chosen", "rejected")):
            prompt, *answers = _parts(row)
            return (prompt, *(prompt + answer for answer in answers)) if isinstance(prompt, str) else ()  # as encoded
        return texts_of((row["prompt"], row["chosen"], row["rejected"]), spec=spec)

    def prepare_tokenizer(self, folder: Path, *, is_trained: bool) -> None:
        """Gives a tokenizer that was trained on the data a chat template."""
        if is_trained:
            give_chat_template(folder)

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens and labels of both answers, the shorter one filled up."""
        if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
            raise ValueError("chosen and rejected are of different types. To fix: give two texts, or two lists")
        pair = _texts(row, context) if isinstance(row["chosen"], str) else _conversations(row, context)
        width = max(len(each["input_ids"]) for each in pair)
        fill = {"input_ids": context.tokenizer.pad_id, "labels": IGNORED}
        return {
            name: np.array([each[name] + [value] * (width - len(each[name])) for each in pair])
            for name, value in fill.items()
        }

    def training_faults(self, folder: Path) -> Iterable[str]:
        """Returns what is wrong where no answer is preferred to another one."""
        if are_pairs_equal(folder):
            yield (
                "chosen and rejected are the same in all rows to train on, so that there is nothing to learn. To fix: "
                "give answers that differ, or name other columns by chosen_column and rejected_column"
            )


def _texts(row: Mapping[str, Any], context: SampleContext) -> list[dict[str, list[int]]]:
    refuse_tools(row)
    prompt, chosen, rejected = _parts(row)
    if not isinstance(prompt, str):
        raise ValueError("the prompt is no text, and the answers are. To fix: give three texts, or three lists")
    return answered(prompt, [chosen, rejected], context)


def _parts(row: Mapping[str, Any]) -> tuple[Any, str, str]:
    """The prompt and both answers, of texts.

    Without a prompt, it is what both answers begin with, as in TRL: without a space at its end, which belongs to the
    next word. An answer that the other one begins with keeps its last character.
    """
    prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
    if prompt is None:
        length = num_common(chosen, rejected)
        if length == min(len(chosen), len(rejected)):
            length = max(length - 1, 0)
        elif chosen[:length].endswith(" "):
            length -= 1
        prompt = chosen[:length]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return prompt, chosen, rejected


def _conversations(row: Mapping[str, Any], context: SampleContext) -> list[dict[str, list[int]]]:
    roles = context.tokenizer.roles
    chosen, rejected = (as_messages(row[key], roles=roles) for key in ("chosen", "rejected"))
    if row["prompt"] is None:
        prompt = chosen[: num_common(chosen, rejected)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        prompt = as_messages(row["prompt"], roles=roles)
    if not prompt or not chosen or not rejected:
        raise ValueError("the prompt or an answer has no message. To fix: give both answers messages of their own")
    tools = tools_of(row["tools"])
    return [answered_chat(prompt, answer, context, tools=tools) for answer in (chosen, rejected)]
