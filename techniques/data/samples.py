"""Samples of tensors from prepared columns, one at a time or in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import Array
from ringmaster.techniques.interface.data_source import Dataset

if TYPE_CHECKING:
    import torch

Indices = Sequence[int] | NDArray[np.int64]
Collate = Callable[[Mapping[str, Array]], "dict[str, torch.Tensor]"]


@runtime_checkable
class Batched(Protocol):
    """A data set that returns many samples at once, stacked; a user's own data set may do so too."""

    def rows(self, indices: Indices, /) -> dict[str, torch.Tensor]:
        """Returns the samples of `indices`, each column stacked along dimension 0."""


class ArraySamples:
    """Samples over memory-mapped columns: {name: [rows, ...]}.

    collate: makes a batch of some rows of the columns.
    """

    def __init__(self, columns: Mapping[str, Array], *, collate: Collate) -> None:
        self._columns, self._collate = dict(columns), collate
        self._num_samples = min((len(column) for column in self._columns.values()), default=0)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int, /) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: column[0] for name, column in self.rows([index]).items()}

    def rows(self, indices: Indices, /) -> dict[str, torch.Tensor]:
        """Returns the samples of `indices`, stacked: {name: [len(indices), ...]}."""
        chosen = np.asarray(indices, dtype=np.int64)
        return self._collate({name: column[chosen] for name, column in self._columns.items()})


def as_tensors(columns: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Returns columns as tensors.

    Integers become int64. A column `pixel_values` of bytes becomes float32 in -1..1. If there are `input_ids` and no
    `labels`, the labels are the same tensor: a language model's loss shifts them.
    """
    import torch

    batch = {name: torch.from_numpy(_values(name, column)) for name, column in columns.items()}
    if "input_ids" in batch:
        batch.setdefault("labels", batch["input_ids"])
    return batch


@runtime_checkable
class Padded(Batched, Protocol):
    """A data set whose samples differ in length, and are padded to one width when they are read."""

    width: int

    def lengths(self) -> NDArray[np.int64]:
        """Returns the length of each sample, [samples]."""

    def longest(self, indices: Indices, /) -> int:
        """Returns the length of the longest of some samples."""

    def rows(self, indices: Indices, /, *, width: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the samples of `indices`, padded to `width`; None for the data set's own."""


def width_of(dataset: Dataset, indices: Indices, *, multiple_of: int) -> int | None:
    """Returns the width to which the samples of a batch are padded: the longest one's, rounded up.

    It is at most the data set's own width, whatever `multiple_of` is. None where samples are not padded.
    """
    if not isinstance(dataset, Padded):
        return None
    return min(-(-dataset.longest(indices) // multiple_of) * multiple_of, dataset.width)


def num_tokens_of(batch: Mapping[str, torch.Tensor]) -> int:
    """Returns the number of input tokens of a batch: those of its mask, without padding, or all where it has none.

    0 where the samples are no tokens, such as images.
    """
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else 0


def fetch(
    dataset: Dataset,
    indices: Indices,
    *,
    before_each: Callable[[int], object] | None = None,
    width: int | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the samples of `indices` as one batch: {name: [len(indices), ...]}.

    before_each: called before each sample is read, with its position in `indices`, if samples are read one at a time.
    width: the number of tokens to which the samples of a `Padded` data set are padded; None for its own.
    """
    if width is not None and isinstance(dataset, Padded):
        return dataset.rows(indices, width=width)
    if isinstance(dataset, Batched):
        return dataset.rows(indices)
    from torch.utils.data import default_collate

    samples = []
    for place, index in enumerate(indices):
        if before_each is not None:
            before_each(place)
        samples.append(dataset[int(index)])
    return cast("dict[str, torch.Tensor]", default_collate(samples))


def _values(name: str, rows: Array) -> Array:
    if name == "pixel_values" and rows.dtype == np.uint8:
        return rows.astype(np.float32) / np.float32(127.5) - np.float32(1)
    if rows.dtype.kind in "iu":
        return rows.astype(np.int64)
    return np.asarray(rows, dtype=np.float32) if rows.dtype == np.float64 else np.asarray(rows)
