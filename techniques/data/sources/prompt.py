"""Prompts to which a language model in training writes the completions itself, with the columns that rewards read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringmaster.techniques.data.arrow_files import Array
from ringmaster.techniques.data.row_source import Columns, RowSource, SampleContext, columns_of_files
from ringmaster.techniques.data.sources.chat import messages_of
from ringmaster.techniques.data_source import DataOptions, PreparedData, column
from ringmaster.techniques.job import DataSpec

if TYPE_CHECKING:
    import torch

PROMPT = "prompt"
ROW = "row"
"""The tensor of a sample with its row as JSON in UTF-8, padded with 0: [bytes]."""
TAKEN = ("prompts", "completions", "completion_ids")
"""The names of arguments of reward functions that no column may have."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(DataOptions):
    """The column of prompts."""

    prompt_column: str | None = column("prompt", "messages", "question", "instruction")


class Prompt(RowSource):
    """The tokens of a prompt, and its row. A prompt is a text, or a list of messages for the tokenizer's chat template.

    Messages are rendered up to where the assistant's answer begins. All other columns of a row are for the functions
    that reward completions. Prompts are never cut: one that is longer than `seq_len` is refused.
    """

    name = "prompt"
    options_class = PromptOptions
    needs_tokenizer = True
    reads_messages = True
    version = 4
    padding: ClassVar[Mapping[str, int]] = {"input_ids": 0, "attention_mask": 0, ROW: 0}
    uncut: ClassVar[frozenset[str]] = frozenset({ROW})

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the prompt's column, and all others under their own names."""
        result = super().columns(spec, available)
        there = columns_of_files(spec, kind=self.name) if available is None else available
        others = {name: name for name in there if name not in (*result.columns.values(), PROMPT)}
        if taken := sorted(set(TAKEN) & set(others)):
            raise ValueError(f"a column has the name {taken[0]}, of an argument of rewards. To fix: rename it")
        return Columns(columns={**result.columns, **others}, roles=(PROMPT, *others), optional=frozenset(others))

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the prompt, or the contents of its messages where a tokenizer is trained on them."""
        prompt = row[PROMPT]
        if isinstance(prompt, str):
            return (prompt,)
        return (
            () if context.spec.tokenizer is not None else [str(each.get("content", "")) for each in messages_of(prompt)]
        )

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the prompt's tokens and mask, and the row as bytes."""
        prompt = row[PROMPT]
        if isinstance(prompt, str):
            encoded = context.tokenizer.encode(prompt)
            tokens = [*context.tokenizer.start_ids, *encoded] if encoded else []
        else:
            prompt = messages_of(prompt, roles=context.tokenizer.roles)
            tokens = context.tokenizer.prompt(prompt)
        if not tokens:
            raise ValueError("the prompt is empty. To fix: remove the row")
        if len(tokens) > context.max_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, and prompts are not cut at {context.max_length}. To fix: raise "
                "data.seq_len, or remove the row"
            )
        encoded_row = json.dumps({**row, PROMPT: prompt}, default=str).encode()  # dates of Parquet files become texts
        return {
            "input_ids": tokens,
            "attention_mask": [1] * len(tokens),
            ROW: np.frombuffer(encoded_row, dtype=np.uint8),
        }

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description without the rows, which no model reads."""
        return replace(prepared, tensors=tuple(tensor for tensor in prepared.tensors if tensor.name != ROW))

    def collate(self, columns: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Returns the batch; its prompts are no labels."""
        batch = super().collate(columns)
        batch.pop("labels", None)
        return batch
