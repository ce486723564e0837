"""Texts with the texts that an encoder-decoder writes for them, such as translations and summaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ringmaster.techniques.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.data.sources.text_classification import text_of
from ringmaster.techniques.interface.job import DataSpec


class Seq2Seq(RowSource):
    """The tokens of an input and, as labels, those of its target, each with the tokenizer's special tokens.

    Both end with the tokenizer's end of text. The option `prefix` is put before each input, such as "summarize: ".
    """

    name = "seq2seq"
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "input": ("input", "source", "document", "article"),
        "target": ("target", "output", "summary", "highlights"),
    }
    options: ClassVar[Mapping[str, Any]] = {"prefix": ""}
    needs_tokenizer = True

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the input with its prefix, and the target."""
        return f"{self.option(spec, 'prefix')}{row['input']}", row["target"]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens of the input, and those of the target as labels."""
        text = f"{self.option(context.spec, 'prefix')}{text_of(row, 'input')}"
        return {"input_ids": _ended(text, context), "labels": _ended(text_of(row, "target"), context)}


def _ended(text: str, context: SampleContext) -> list[int]:
    """The tokens of a text with special tokens, ended by the end of text also where the tokenizer adds none."""
    tokenizer = context.tokenizer
    tokens = tokenizer.with_special(tokenizer.encode(text), at_most=context.max_length).tokens
    if tokenizer.end_id is None or tokens[-1] == tokenizer.end_id:
        return tokens
    return [*tokens[: context.max_length - 1], tokenizer.end_id]
