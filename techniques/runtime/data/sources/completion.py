"""Prompts with their completions, of which a language model learns the completions alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.runtime.data.sources.text_classification import text_of


class Completion(RowSource):
    """The tokens of a prompt and of its completion, which ends with the end of text. The prompt has no labels."""

    name = "completion"
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prompt": ("prompt", "instruction", "question"),
        "completion": ("completion", "response", "output", "answer"),
    }
    needs_tokenizer = True
    is_causal = True
    packs = True

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns both texts."""
        return row["prompt"], row["completion"]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, and labels for those of the completion."""
        prompt = context.tokenizer.encode(text_of(row, "prompt"))
        return answered(prompt, completion_of(text_of(row, "completion"), context))


def completion_of(text: str, context: SampleContext) -> list[int]:
    """Returns the tokens of a completion with the end of text."""
    end = context.tokenizer.end_id
    return context.tokenizer.encode(text) + ([] if end is None else [end])


def answered(prompt: list[int], completion: list[int]) -> dict[str, list[int]]:
    """Returns the tokens of a prompt and its completion, with labels for the completion alone."""
    return {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}
