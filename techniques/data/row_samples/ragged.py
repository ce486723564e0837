"""Columns whose rows differ in length, stored as one stream of values and the end of each row, padded when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ringmaster.techniques.data.arrays import Array, ColumnWriter
from ringmaster.techniques.data.samples import ArraySamples, Collate, Indices

if TYPE_CHECKING:
    import torch

VALUES, ENDS = ".values", ".ends"
"""Suffixes of the two stored columns of a ragged column."""


@dataclass(frozen=True)
class Ragged:
    """Rows [..., length] that differ in length. values: [all lengths, ...]; lengths: [rows]."""

    values: Array
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Array], *, dtype: DTypeLike | None = None) -> Self:
        """Returns rows, at least one, as `dtype`. Raises ValueError where their leading dimensions differ."""
        flat = [row if row.ndim == 1 else np.moveaxis(row, -1, 0) for row in rows]
        lengths = np.fromiter(map(len, flat), dtype=np.int64, count=len(flat))
        return cls(np.concatenate(flat, dtype=dtype, casting="unsafe"), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def chosen(self, rows: NDArray[np.bool_]) -> Ragged:
        """Returns some of the rows."""
        return self if rows.all() else Ragged(self.values[np.repeat(rows, self.lengths)], self.lengths[rows])

    def rows(self) -> list[Array]:
        """Returns each row."""
        return [np.moveaxis(part, 0, -1) for part in np.split(self.values, np.cumsum(self.lengths)[:-1])]


class RaggedWriter:
    """Appends rows [..., length] of different lengths to the columns of a `ColumnWriter`."""

    def __init__(self, writer: ColumnWriter) -> None:
        self._writer = writer
        self._ends: dict[tuple[str, str], int] = {}

    def append(self, split: str, name: str, rows: Ragged) -> None:
        """Appends rows to the column `name` of a split; their leading dimensions must be those of the rows before."""
        first = self._ends.get((split, name), 0)
        ends = first + np.cumsum(rows.lengths)
        self._ends[split, name] = int(ends[-1]) if len(ends) else first
        self._writer.append(split, {name + VALUES: rows.values, name + ENDS: ends})


class RaggedColumn:
    """A stored ragged column. values: [all lengths, ...]; ends: [rows]. fill: the value that pads shorter rows."""

    def __init__(self, values: Array, ends: Array, *, fill: int) -> None:
        # Plain views of memory-mapped arrays: np.memmap makes an object of its own of each slice, five times as slowly.
        self._values, self._ends, self._fill = np.asarray(values), np.asarray(ends), fill

    def __len__(self) -> int:
        return len(self._ends)

    def lengths(self, indices: Indices | slice) -> Array:
        """Returns the lengths of rows, [rows]."""
        chosen = np.arange(len(self))[indices] if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        first, ends = self._bounds(chosen)
        lengths: Array = ends - first
        return lengths

    def padded(self, indices: Indices, *, width: int) -> Array:
        """Returns rows, cut or padded on the right to `width`: [rows, ..., width]."""
        rows = np.full((len(indices), width, *self._values.shape[1:]), self._fill, dtype=self._values.dtype)
        first, ends = self._bounds(np.asarray(indices, dtype=np.int64))
        for row, start, end in zip(rows, first.tolist(), np.minimum(ends, first + width).tolist(), strict=True):
            row[: end - start] = self._values[start:end]
        return np.ascontiguousarray(np.moveaxis(rows, 1, -1))

    def _bounds(self, rows: Array) -> tuple[Array, Array]:
        """Returns where each row's values begin, and where they end: [rows] and [rows]."""
        return np.where(rows > 0, self._ends[rows - 1], 0), self._ends[rows]


def rows_of(name: str, columns: Mapping[str, Array], *, most: int) -> list[Array] | None:
    """Returns at most `most` rows of a ragged column, evenly spread: [length, ...] each; None where there is none."""
    if name + ENDS not in columns:
        return None
    ends, values = columns[name + ENDS], columns[name + VALUES]
    chosen = np.unique(np.linspace(0, len(ends) - 1, min(most, len(ends))).astype(np.int64))
    return [np.asarray(values[int(ends[i - 1]) if i else 0 : int(ends[i])]) for i in chosen]


class PaddedSamples(ArraySamples):
    """Samples with ragged columns, which are padded to one width.

    columns: the columns as they are stored. width: the width where `rows` is given none. padding: the fill values.
    """

    def __init__(
        self, columns: Mapping[str, Array], *, collate: Collate, width: int, padding: Mapping[str, int]
    ) -> None:
        names = [name.removesuffix(ENDS) for name in columns if name.endswith(ENDS)]
        plain = {name: column for name, column in columns.items() if not name.endswith((VALUES, ENDS))}
        self._ragged = {
            name: RaggedColumn(columns[name + VALUES], columns[name + ENDS], fill=padding.get(name, 0))
            for name in names
        }
        super().__init__(plain, collate=collate)
        lengths = [*map(len, plain.values()), *map(len, self._ragged.values())]
        self._num_samples = min(lengths, default=0)
        self.width = width

    def lengths(self, indices: Indices | slice = slice(None)) -> NDArray[np.int64]:
        """Returns the length of each sample, or of some, the longest of its columns: [samples]."""
        every = [column.lengths(indices) for column in self._ragged.values()]
        return np.max(every, axis=0) if every else np.zeros(len(self), dtype=np.int64)

    def longest(self, indices: Indices) -> int:
        """Returns the length of the longest of some samples."""
        return max((int(column.lengths(indices).max(initial=0)) for column in self._ragged.values()), default=0)

    def rows(self, indices: Indices, /, *, width: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the samples of `indices`, stacked, with ragged columns padded to `width`."""
        chosen = np.asarray(indices, dtype=np.int64)
        columns = {name: column[chosen] for name, column in self._columns.items()}
        to = width or self.width
        columns |= {name: column.padded(chosen, width=to) for name, column in self._ragged.items()}
        return self._collate(columns)
