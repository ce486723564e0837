"""Columns of equally shaped rows on disk: raw arrays, written in a stream and memory-mapped when read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

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
