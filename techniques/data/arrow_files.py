"""Samples as Arrow files: `training.arrow` and `held_out.arrow` in a folder, which `datasets.Dataset.from_file` opens.

A column has an element for each sample: a number, nested lists of fixed sizes (an array), or a list of any length (what
is padded). Files are written and read by pyarrow, on which `datasets` is built: importing that takes .8 s and 85 MB in
each process that trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Indices = Sequence[int] | NDArray[np.int64]
Table = Any  # a `pyarrow.Table`, which has no types

SPLITS = ("training", "held_out")
TOKENS, MASK, LABELS, POSITIONS = "input_ids", "attention_mask", "labels", "position_ids"


def split_file(folder: Path, split: str) -> Path:
    """Returns the file of a split."""
    return folder / f"{split}.arrow"


def column_of(values: Array, lengths: NDArray[np.int64] | None = None) -> Any:
    """Returns values [rows, ...] as a column; with the lengths of rows, values [all lengths, ...] as one of lists."""
    import pyarrow as pa  # type: ignore[import-untyped]

    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    if lengths is None:
        return column
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), column)


def values_of(column: Any) -> tuple[Array, NDArray[np.int64] | None]:
    """Returns the values of a column, [rows, ...], or [all lengths, ...] with the lengths of its rows."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    lengths, shape = None, []
    if pa.types.is_list(column.type):
        lengths, column = np.diff(column.offsets.to_numpy()).astype(np.int64), column.flatten()
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False).reshape(-1, *shape), lengths


def is_ragged(field: Any) -> bool:
    """Returns whether the rows of a field of a schema differ in length."""
    import pyarrow as pa

    return bool(pa.types.is_list(field.type))


def table_of(columns: Mapping[str, Any]) -> Table:
    """Returns a table of columns, which may be arrays of numpy."""
    import pyarrow as pa

    return pa.table(dict(columns))


def texts_column(texts: Sequence[str | None]) -> Any:
    """Returns texts as a column."""
    import pyarrow as pa

    return pa.array(texts, pa.string())


class ArrowWriter:
    """Writes tables of equal columns into a file. Without a table, there is no file.

    refused: returns what is to be raised where the columns of a table differ from those before.
    """

    def __init__(self, path: Path, *, refused: Callable[[Exception], Exception] = lambda error: error) -> None:
        self._path, self._refused = path, refused
        self._files = ExitStack()
        self._stream: Any = None
        self._schema: Any = None
        self.num_rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def write(self, table: Table) -> None:
        """Appends the rows of a table."""
        import pyarrow as pa

        if self._stream is None:
            self._schema = table.schema
            self._stream = self._files.enter_context(pa.ipc.new_stream(str(self._path), self._schema))
        elif table.schema != self._schema:
            raise self._refused(_difference(self._schema, table.schema))
        self._stream.write_table(table.combine_chunks())
        self.num_rows += table.num_rows


def _difference(before: Any, now: Any) -> Exception:
    if others := {*before.names} ^ {*now.names}:
        return KeyError(min(others))
    name = next(name for name in before.names if before.field(name) != now.field(name))
    return ValueError(
        f"column {name!r} has rows of {before.field(name).type} and of {now.field(name).type}: rows of a column must "
        "be alike. To fix: pad, resize or fill them, or give the samples by a factory"
    )


def read_tables(path: Path, *, names: Sequence[str] | None = None) -> Iterator[Table]:
    """Yields the rows of a file, some at a time. They are read, not mapped: mapped pages count as memory."""
    import pyarrow as pa

    if not path.exists():
        return
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            yield pa.Table.from_batches([batch]).select(names or batch.schema.names)


def read_table(path: Path) -> Table:
    """Returns all rows of a file, read into memory."""
    import pyarrow as pa

    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_all()


def open_split(folder: Path, split: str) -> Table:
    """Returns the rows of a split, memory-mapped; a table without columns where there is none."""
    import pyarrow as pa

    path = split_file(folder, split)
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all() if path.exists() else pa.table({})


class TableRows:
    """Reads rows of a memory-mapped table anywhere in it."""

    def __init__(self, table: Table) -> None:
        self.schema = table.schema
        self._batches = table.to_batches()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __call__(self, indices: Indices) -> Table:
        """Returns the rows of some indices, in their order."""
        import pyarrow as pa

        chosen = np.asarray(indices, dtype=np.int64)
        numbers = np.searchsorted(self._starts, chosen, side="right") - 1
        places = chosen - self._starts[numbers]
        rows = [self._batches[number].slice(place, 1) for number, place in zip(numbers, places, strict=True)]
        return pa.Table.from_batches(rows, self.schema)


def fingerprint(folder: Path, *, splits: Iterable[str] = SPLITS) -> str:
    """Returns a hexadecimal digest of the samples in `folder`, of all splits or of some.

    It does not depend on how rows were written: of a ragged column, the ends of rows and all values are hashed.
    """
    sha = hashlib.sha256()
    for split in splits:
        path = split_file(folder, split)
        for field in sorted(open_split(folder, split).schema, key=lambda field: str(field.name)):
            for part in ("ends", "values") if is_ragged(field) else ("rows",):
                _hash_column(sha, path, split, field.name, part)
    return sha.hexdigest()[:16]


def _hash_column(sha: Any, path: Path, split: str, name: str, part: str) -> None:
    """Adds a column of rows of one shape, or the ends or the values of a ragged one, to a hash."""
    table = open_split(path.parent, split)
    empty, _ = values_of(table[name].slice(0, 0))
    num_values, before = table.num_rows, 0
    if part == "values":
        num_values = sum(len(column.flatten()) for column in table[name].chunks)
    header = f"{name}.{part} <i8 ({num_values},)" if part == "ends" else (
        f"{name}{'.values' if part == 'values' else ''} {empty.dtype.str} {(num_values, *empty.shape[1:])}"
    )  # fmt: skip
    sha.update(f"{split} {header}".encode())
    for rows in read_tables(path, names=[name]):
        values, lengths = values_of(rows[name])
        if part == "ends":
            assert lengths is not None
            values = before + np.cumsum(lengths)
            before = int(values[-1]) if len(values) else before
        sha.update(np.ascontiguousarray(values).data)


def num_values(folder: Path, name: str) -> int | None:
    """Returns one more than the largest value of a column of whole numbers in all splits; None where there is none."""
    largest = -1
    for split in SPLITS:
        if name not in open_split(folder, split).column_names:
            continue
        for rows in read_tables(split_file(folder, split), names=[name]):
            values = values_of(rows[name])[0]
            if values.dtype.kind not in "iu":
                return None
            largest = max(largest, 0, int(values.max(initial=0)))
    return None if largest < 0 else largest + 1


def some_rows(folder: Path, split: str, *, most: int) -> dict[str, list[Array] | Array]:
    """Returns at most `most` rows, evenly spread, of each column: [rows, ...], or a list of rows that differ."""
    table = open_split(folder, split)
    chosen = np.unique(np.linspace(0, table.num_rows - 1, min(most, table.num_rows)).astype(np.int64))
    rows = TableRows(table)(chosen)
    found: dict[str, list[Array] | Array] = {}
    for name in rows.column_names if len(chosen) else ():
        values, lengths = values_of(rows[name])
        found[name] = values if lengths is None else np.split(values, np.cumsum(lengths)[:-1])
    return found


def padded(values: Array, lengths: NDArray[np.int64], *, width: int, fill: int) -> Array:
    """Returns ragged rows, cut or padded on the right to `width`: [rows, ..., width]."""
    rows = np.full((len(lengths), width, *values.shape[1:]), fill, dtype=values.dtype)
    if lengths.max(initial=0) > width:
        places = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = values[places < width]
    rows[np.arange(width) < lengths[:, None]] = values
    return np.ascontiguousarray(np.moveaxis(rows, 1, -1))
