"""Pairs of texts that belong together, from which a model learns embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.runtime.data.arrays import Array
from ringmaster.techniques.runtime.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.runtime.data.samples import as_tensors
from ringmaster.techniques.runtime.data.sources.text_classification import text_of

if TYPE_CHECKING:
    import torch


class Embedding(RowSource):
    """Two rows of tokens, [2, tokens], with their masks: an anchor, and the text that belongs to it."""

    name = "embedding"
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "anchor": ("anchor", "query", "question", "sentence1"),
        "positive": ("positive", "document", "answer", "sentence2"),
    }
    needs_tokenizer = True

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns both texts."""
        return row["anchor"], row["positive"]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens of both texts with special tokens, the shorter one filled up, and their masks."""
        tokenizer = context.tokenizer
        pair = [
            tokenizer.with_special(tokenizer.encode(text_of(row, role)), at_most=context.max_length).tokens
            for role in self.roles
        ]
        width = max(map(len, pair))
        return {
            "input_ids": np.array([tokens + [tokenizer.pad_id] * (width - len(tokens)) for tokens in pair]),
            "attention_mask": np.array([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in pair]),
        }

    def collate(self, columns: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Returns tokens and masks, without labels: the other pairs of a batch are what a text is told from."""
        return {name: tensor for name, tensor in as_tensors(columns).items() if name != "labels"}
