"""Pairs of texts: inputs with the target that an encoder-decoder writes, and texts whose embeddings are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmaster.techniques.data.arrow_files import Array
from ringmaster.techniques.data.row_source import Columns, RowSource, SampleContext
from ringmaster.techniques.data.samples import as_tensors
from ringmaster.techniques.data.sources.labelled_text import text_of
from ringmaster.techniques.data.unfit_data import are_samples_equal
from ringmaster.techniques.data_source import DataOptions, column
from ringmaster.techniques.job import DataSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Seq2SeqOptions(DataOptions):
    """The columns of an input and its target. prefix: what is put before each input."""

    input_column: str | None = column("input", "source", "document", "article")
    target_column: str | None = column("target", "output", "summary", "highlights")
    prefix: str = ""


class Seq2Seq(RowSource):
    """The tokens of an input and, as labels, those of its target, each with the tokenizer's special tokens.

    Both end with the tokenizer's end of text. The option `prefix` is put before each input, such as "summarize: ".
    """

    name = "seq2seq"
    options_class = Seq2SeqOptions
    needs_tokenizer = True

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the input with its prefix, and the target."""
        return f"{context.options.prefix}{row['input']}", row["target"]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens of the input, and those of the target as labels."""
        text = f"{context.options.prefix}{text_of(row, 'input')}"
        return {"input_ids": _ended(text, context), "labels": _ended(text_of(row, "target"), context)}


def _ended(text: str, context: SampleContext) -> list[int]:
    """The tokens of a text with special tokens, ended by the end of text also where the tokenizer adds none."""
    tokenizer = context.tokenizer
    tokens = tokenizer.with_special(tokenizer.encode(text), at_most=context.max_length).tokens
    if tokenizer.end_id is None or tokens[-1] == tokenizer.end_id:
        return tokens
    return [*tokens[: context.max_length - 1], tokenizer.end_id]


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(DataOptions):
    """The columns of a text, of one that belongs to it, and of one that does not.

    retriever: the settings of the `Retriever` that finds further texts that do not belong to it in a knowledge store.
    """

    anchor_column: str | None = column("anchor", "query", "question", "sentence1")
    positive_column: str | None = column("positive", "document", "answer", "sentence2")
    negative_column: str | None = column("negative", "hard_negative", is_optional=True)
    retriever: Mapping[str, Any] | None = None


class Embedding(RowSource):
    """Two rows of tokens, [2, tokens], with their masks: an anchor, and the text that belongs to it.

    Files with a `negative` have three, [3, tokens]: a similar text that does not belong to it. A retriever adds k of
    these: the passages of a store that are most similar to the anchor, without those that hold the positive.
    """

    name = "embedding"
    version = 2
    options_class = EmbeddingOptions
    needs_tokenizer = True

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the columns; where there is one of negatives, every row has one."""
        result = super().columns(spec, available)
        return replace(result, optional=result.optional - result.columns.keys())

    def with_passages(self, rows: Sequence[Mapping[str, Any]], *, context: SampleContext) -> list[Mapping[str, Any]]:
        """Returns rows with hard negatives that are mined in the store: they are as new roles."""
        if context.retriever is None:
            return list(rows)
        from ringmaster.techniques.retrieval.knowledge_store import find_passages  # imports torch

        anchors, positives = ([str(row[role]) for row in rows] for role in ("anchor", "positive"))
        return [
            {**row, **{f"mined {place}": each.text for place, each in enumerate(passages)}}
            for row, passages in zip(rows, find_passages(context, anchors, but=positives), strict=True)
        ]

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the texts."""
        return (text for text in row.values() if text is not None)

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens of the texts with special tokens, shorter ones filled up, and their masks."""
        tokenizer = context.tokenizer
        texts = [
            tokenizer.with_special(tokenizer.encode(text_of(row, role)), at_most=context.max_length).tokens
            for role in row
            if row[role] is not None or role != "negative"
        ]
        width = max(map(len, texts))
        return {
            "input_ids": np.array([tokens + [tokenizer.pad_id] * (width - len(tokens)) for tokens in texts]),
            "attention_mask": np.array([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in texts]),
        }

    def collate(self, columns: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Returns tokens and masks, without labels: the other pairs of a batch are what a text is told from."""
        return {name: tensor for name, tensor in as_tensors(columns).items() if name != "labels"}

    def training_faults(self, folder: Path) -> Iterable[str]:
        """Returns what is wrong where no text can be told from another one."""
        if are_samples_equal(folder):
            yield (
                "all rows to train on are the same, so that there is nothing to learn. To fix: give texts that differ, "
                "or name other columns by anchor_column and positive_column"
            )
