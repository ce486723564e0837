"""Columns of samples on disk: raw arrays, written in a stream and memory-mapped when read.

The rows of a column have one shape (`ColumnWriter`), or differ in length (`RaggedArray`): then the column is stored as
one stream of values and the end of each row. `SampleArrays` holds the columns of many samples in memory, and
`SampleForm` says how the arrays of samples become columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    pass


Array = NDArray[Any]
Indices = Sequence[int] | NDArray[np.int64]

SPLITS = ("training", "held_out")
VALUES_PER_BLOCK = 1 << 20


class ColumnWriter:
    """Writes the columns of both splits into `folder`; the first rows of a column fix its dtype and shape.

    It is a context manager: the columns become readable when the context ends without an exception.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._columns: dict[tuple[str, str], BinaryIO] = {}
        self._layout: dict[str, dict[str, Any]] = {split: {} for split in SPLITS}
        self._num_values: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
        if kind is None:
            (self._folder / "layout.json").write_text(json.dumps(self._layout))

    def append(self, split: str, columns: Mapping[str, Array]) -> None:
        """Appends rows to `split`: {column: [rows, ...]}. Raises ValueError where a column's shape or dtype changes."""
        for name, rows in columns.items():
            self._append(split, name, rows, shape=rows.shape[1:])

    def append_stream(self, split: str, name: str, values: Array, *, row_len: int) -> None:
        """Appends values of a column whose rows are cut from a stream; an incomplete last row is left out."""
        self._append(split, name, values, shape=(row_len,))

    def _append(self, split: str, name: str, values: Array, *, shape: tuple[int, ...]) -> None:
        key = split, name
        if key not in self._columns:
            path = _file(self._folder, split, name)
            self._columns[key] = self._files.enter_context(path.open("wb"))
            self._layout[split][name] = {"dtype": values.dtype.str, "shape": list(shape), "num_rows": 0}
            self._num_values[key] = 0
        layout = self._layout[split][name]
        if layout["shape"] != list(shape) or layout["dtype"] != values.dtype.str:
            raise ValueError(
                f"column {name!r} has rows of {layout['dtype']}{layout['shape']} and of {values.dtype.str}"
                f"{list(shape)}: rows of a column must be alike. To fix: pad, resize or fill them, or give the "
                f"samples by a factory"
            )
        self._columns[key].write(np.ascontiguousarray(values).data)
        self._num_values[key] += values.size
        layout["num_rows"] = self._num_values[key] // int(np.prod(shape, dtype=np.int64))

    def convert(self, name: str, dtype: np.dtype[Any]) -> None:
        """Converts what is written of a column to another dtype, a block at a time."""
        for split in SPLITS:
            if (split, name) not in self._columns:
                continue
            self._columns[split, name].close()
            path, layout = _file(self._folder, split, name), self._layout[split][name]
            converted = path.with_name(f"{path.name}.converted")
            with converted.open("wb") as file:
                for values in _values(path, np.dtype(layout["dtype"])):
                    file.write(values.astype(dtype).data)
            converted.rename(path)
            layout["dtype"] = dtype.str
            self._columns[split, name] = self._files.enter_context(path.open("ab"))

    def num_rows(self, split: str) -> int:
        """Returns the number of complete rows written to `split` so far."""
        return max((column["num_rows"] for column in self._layout[split].values()), default=0)


def open_columns(folder: Path, split: str) -> dict[str, Array]:
    """Returns the columns of one split, {name: [rows, ...]}, memory-mapped read-only."""
    layout = json.loads((folder / "layout.json").read_text())[split]
    return {name: _map(_file(folder, split, name), **column) for name, column in layout.items()}


def fingerprint(folder: Path, *, splits: Iterable[str] = SPLITS) -> str:
    """Returns a hexadecimal digest of the content of the columns in `folder`, of all splits or of some."""
    sha = hashlib.sha256()
    for split in splits:
        for name, rows in sorted(open_columns(folder, split).items()):
            sha.update(f"{split} {name} {rows.dtype.str} {rows.shape}".encode())
            for values in blocks(folder, split, name):
                sha.update(values.data)
    return sha.hexdigest()[:16]


def blocks(folder: Path, split: str, name: str) -> Iterator[Array]:
    """Yields the values of a column's complete rows, flat, some at a time.

    They are read, not mapped: mapped pages would count as memory of the process until the column is closed.
    """
    rows = open_columns(folder, split)[name]
    if rows.size:
        yield from _values(_file(folder, split, name), rows.dtype, num_values=rows.size)


def num_values(folder: Path, name: str) -> int | None:
    """Returns one more than the largest value of a column of whole numbers in all splits; None where there is none."""
    columns = {split: open_columns(folder, split).get(name) for split in SPLITS}
    found = [split for split, column in columns.items() if column is not None and column.dtype.kind in "iu"]
    largest = (int(values.max()) for split in found for values in blocks(folder, split, name))
    return 1 + max((0, *largest)) if found else None


def read_slices(folder: Path, split: str, name: str, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Array]]:
    """Yields parts of a column of single values, read and not mapped: the number of the range, and its values.

    ranges: (start, stop), ascending and without overlap. A long range comes in several parts.
    """
    dtype = open_columns(folder, split)[name].dtype
    with _file(folder, split, name).open("rb") as file:
        place = 0
        for number, (start, stop) in enumerate(ranges):
            if start != place:
                file.seek(start * dtype.itemsize)
            for first in range(start, stop, VALUES_PER_BLOCK):
                yield number, np.frombuffer(file.read(min(stop - first, VALUES_PER_BLOCK) * dtype.itemsize), dtype)
            place = stop


class ColumnReader:
    """Reads rows of the columns of a split. They are read, not mapped, as mapped pages count as memory."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder, self._split = folder, split
        self._layout = json.loads((folder / "layout.json").read_text())[split]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._layout)

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Returns the rows of a column from `start` up to `stop`, without it."""
        dtype, shape = np.dtype(self._layout[name]["dtype"]), self._layout[name]["shape"]
        size = int(np.prod(shape, dtype=np.int64))
        path, offset = _file(self._folder, self._split, name), start * size * dtype.itemsize
        return np.fromfile(path, dtype, count=(stop - start) * size, offset=offset).reshape(stop - start, *shape)


def _values(path: Path, dtype: np.dtype[Any], *, num_values: int | None = None) -> Iterator[Array]:
    left = path.stat().st_size // dtype.itemsize if num_values is None else num_values
    with path.open("rb") as file:
        while left:
            values = np.fromfile(file, dtype, count=min(left, VALUES_PER_BLOCK))
            left -= len(values)
            yield values


def _map(path: Path, *, dtype: str, shape: list[int], num_rows: int) -> Array:
    whole = (num_rows, *shape)
    if num_rows == 0:  # an empty file cannot be mapped
        return np.empty(whole, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=whole)


def _file(folder: Path, split: str, name: str) -> Path:
    return folder / f"{split}.{name}"


VALUES, ENDS = ".values", ".ends"
"""Suffixes of the two stored columns of a ragged column."""


@dataclass(frozen=True)
class RaggedArray:
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

    def chosen(self, rows: NDArray[np.bool_]) -> RaggedArray:
        """Returns some of the rows."""
        return self if rows.all() else RaggedArray(self.values[np.repeat(rows, self.lengths)], self.lengths[rows])

    def rows(self) -> list[Array]:
        """Returns each row."""
        return [np.moveaxis(part, 0, -1) for part in np.split(self.values, np.cumsum(self.lengths)[:-1])]


class RaggedWriter:
    """Appends rows [..., length] of different lengths to the columns of a `ColumnWriter`."""

    def __init__(self, writer: ColumnWriter) -> None:
        self._writer = writer
        self._ends: dict[tuple[str, str], int] = {}

    def append(self, split: str, name: str, rows: RaggedArray) -> None:
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


TOKENS, MASK, LABELS, POSITIONS = "input_ids", "attention_mask", "labels", "position_ids"

Sample = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class SampleArrays:
    """Arrays of samples by name: those that differ in length, and those of one shape, [samples, ...]."""

    ragged: Mapping[str, RaggedArray]
    plain: Mapping[str, Array]

    def chosen(self, samples: NDArray[np.bool_]) -> SampleArrays:
        """Returns those of some samples."""
        return SampleArrays(
            ragged={name: rows.chosen(samples) for name, rows in self.ragged.items()},
            plain={name: rows[samples] for name, rows in self.plain.items()},
        )

    def each(self) -> Iterator[Sample]:
        """Yields those of each sample."""
        columns = {**{name: rows.rows() for name, rows in self.ragged.items()}, **self.plain}
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def with_mask(arrays: SampleArrays) -> SampleArrays:
    """Returns arrays with a mask of tokens where there is none: all tokens of a sample are read."""
    ragged, plain = dict(arrays.ragged), dict(arrays.plain)
    if MASK in ragged or MASK in plain:
        return arrays
    if TOKENS in ragged:
        tokens = ragged[TOKENS]
        ragged[MASK] = RaggedArray(np.ones(tokens.values.shape, np.uint8), tokens.lengths)
    elif TOKENS in plain:
        plain[MASK] = np.ones(plain[TOKENS].shape, np.uint8)
    return SampleArrays(ragged=ragged, plain=plain)


@dataclass(frozen=True, kw_only=True)
class SampleForm:
    """How samples are stored.

    what: the samples, in messages. ragged: the names of arrays whose last dimension differs; `uncut` are those of them
        that keep their length. max_length: the tokens to which the others are cut.
    has_indicators_of_found_classes: whether a label that is a list of numbers is as long as the number of classes that
        were known by then.
    """

    what: str
    ragged: frozenset[str]
    uncut: frozenset[str]
    max_length: int
    has_indicators_of_found_classes: bool = False

    def arrays(self, samples: Sequence[Sample]) -> tuple[SampleArrays, NDArray[np.bool_]]:
        """Returns the arrays of samples, and which samples were cut. Raises ValueError where names or shapes differ."""
        ragged, plain = dict[str, RaggedArray](), dict[str, Array]()
        is_cut = np.zeros(len(samples), bool)
        try:
            for name, first in samples[0].items() if samples else ():
                rows = [sample[name] for sample in samples]
                if self._is_ragged(name, first):
                    too_long = [self._is_cut(name, first) and row.shape[-1] > self.max_length for row in rows]
                    if any(too_long):
                        is_cut |= too_long
                        rows = [row[..., : self.max_length] for row in rows]
                    ragged[name] = RaggedArray.of(rows, dtype=_stored_dtype(first))
                else:
                    plain[name] = np.stack(rows)
            if len(samples) and (others := set().union(*samples) - samples[0].keys()):
                raise KeyError(min(others))
        except (ValueError, KeyError, IndexError) as error:
            raise self.refused(error) from error
        return SampleArrays(ragged=ragged, plain=plain), is_cut

    def refused(self, error: Exception) -> ValueError:
        """Returns what is to be raised for samples that differ."""
        return ValueError(f"{self.what} differ in shape: {error}. To fix: give all rows one shape")

    def _is_cut(self, name: str, array: Array) -> bool:
        return name not in self.uncut and array.dtype.kind != "f"

    def _is_ragged(self, name: str, array: Array) -> bool:
        is_of_classes = self.has_indicators_of_found_classes and name == LABELS
        # An empty list becomes an array of floats.
        is_whole = array.dtype.kind in "biu" or array.size == 0
        return name in self.ragged and array.ndim > 0 and (is_whole or is_of_classes)


class ArrayWriter:
    """Appends the arrays of samples to the columns of a `ColumnWriter`."""

    def __init__(self, writer: ColumnWriter, form: SampleForm) -> None:
        self._writer, self._ragged, self._form = writer, RaggedWriter(writer), form
        self._names: tuple[frozenset[str], frozenset[str]] | None = None

    def append(self, split: str, arrays: SampleArrays) -> None:
        """Appends arrays to a split. Raises ValueError where their names or shapes are others than before."""
        names = frozenset(arrays.ragged), frozenset(arrays.plain)
        if names == (frozenset(), frozenset()):
            return
        try:
            if self._names is not None and names != self._names:
                raise KeyError(min({*names[0], *names[1]} ^ {*self._names[0], *self._names[1]}, default=LABELS))
            self._names = names
            for name, rows in arrays.ragged.items():
                self._ragged.append(split, name, rows)
            self._writer.append(split, arrays.plain)
        except (ValueError, KeyError) as error:
            raise self._form.refused(error) from error


def _stored_dtype(array: Array) -> DTypeLike:
    """32 bits for tokens, which Python makes numbers of 64, and for empty lists, which numpy makes floats of 64."""
    is_given = array.dtype.kind in "iuf" and array.dtype.itemsize < (8 if array.dtype.kind == "f" else 4)
    return array.dtype if is_given else np.dtype(np.int32)
