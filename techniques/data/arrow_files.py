"""Samples as Arrow files: `training.arrow` and `held_out.arrow` in a folder, which `datasets.Dataset.from_file` opens.

A column has an element for each sample: a number, nested lists of fixed sizes (an array), or a list of any length (what
is padded). Files are written and read by pyarrow, on which `datasets` is built: importing that takes .8 s and 85 MB in
each process that trains. Numbers are read by DLPack: `pa.Array.to_numpy` and `pa.array` import pandas: .2 s and 40 MB.
Lists are read by their offsets: `flatten` imports `pyarrow.compute`, .1 s.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
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
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    if lengths is None:
        return column
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), column)


def values_of(column: Any) -> tuple[Array, NDArray[np.int64] | None]:
    """Returns the values of a column, [rows, ...], or [all lengths, ...] with the lengths of its rows."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    lengths, shape = None, []
    if pa.types.is_list(column.type):
        lengths, column = np.diff(np.from_dlpack(column.offsets)).astype(np.int64), _elements(column)
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = _elements(column)
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return column.to_numpy(zero_copy_only=False).reshape(-1, *shape), lengths
    return np.from_dlpack(column).reshape(-1, *shape), lengths


def _elements(lists: Any) -> Any:
    """Returns the elements of lists, which may be some of an array's."""
    if lists.null_count:  # its elements lie between those of others
        return lists.flatten()
    if pa.types.is_fixed_size_list(lists.type):
        size = lists.type.list_size
        return lists.values.slice(size * lists.offset, size * len(lists))
    offsets = np.from_dlpack(lists.offsets)
    return lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def is_ragged(field: Any) -> bool:
    """Returns whether the rows of a field of a schema differ in length."""
    return bool(pa.types.is_list(field.type))


def table_of(columns: Mapping[str, Any]) -> Table:
    """Returns a table of columns, which may be arrays of numpy."""
    return pa.table(dict(columns))


def texts_column(texts: Sequence[str | None]) -> Any:
    """Returns texts as a column."""
    return pa.array(texts, pa.string())


class ArrowWriter(ExitStack):
    """Writes tables of equal columns into a file. Without a table, there is no file.

    refused: returns what is to be raised where the columns of a table differ from those before.
    """

    def __init__(self, path: Path, *, refused: Callable[[Exception], Exception] = lambda error: error) -> None:
        super().__init__()
        self._path, self._refused = path, refused
        self._stream: Any = None
        self._schema: Any = None
        self.num_rows = 0

    def write(self, table: Table) -> None:
        """Appends the rows of a table."""
        if self._stream is None:
            self._schema = table.schema
            self._stream = self.enter_context(pa.ipc.new_stream(str(self._path), self._schema))
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


def read_tables(path: Path, *, name: str | None = None) -> Iterator[Table]:
    """Yields the rows of a file, some at a time, or those of one column; none where there is no file, or no column.

    They are read, not mapped: mapped pages count as memory of the process.
    """
    if not path.exists():
        return
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        if name is None or name in stream.schema.names:
            for batch in stream:
                yield pa.Table.from_batches([batch if name is None else batch.select([name])])


def read_table(path: Path) -> Table:
    """Returns all rows of a file, read into memory."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_all()


def open_split(folder: Path, split: str) -> Table:
    """Returns the rows of a split, memory-mapped; a table without columns where there is none."""
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
    for path, split in ((split_file(folder, split), split) for split in splits):
        if not path.exists():
            continue
        num_rows = sum(table.num_rows for table in read_tables(path))
        for field in sorted(pa.ipc.read_schema(str(path)), key=lambda field: str(field.name)):
            num_values, is_list = num_rows, is_ragged(field)
            name = field.name
            if is_list:
                sha.update(f"{split} {name}.ends <i8 ({num_rows},)".encode())
                num_values, name = 0, f"{name}.values"
                for values, lengths in columns_in(path, field.name):
                    assert lengths is not None
                    sha.update((num_values + np.cumsum(lengths)).data)
                    num_values += len(values)
            empty, _ = values_of(pa.nulls(0, field.type))
            sha.update(f"{split} {name} {empty.dtype.str} {(num_values, *empty.shape[1:])}".encode())
            for values, _ in columns_in(path, field.name):
                sha.update(np.ascontiguousarray(values).data)
    return sha.hexdigest()[:16]


def columns_in(path: Path, name: str) -> Iterator[tuple[Array, NDArray[np.int64] | None]]:
    """Yields the values of a column of a file, some rows at a time, and the lengths of the rows where they differ."""
    for table in read_tables(path, name=name):
        if table.num_rows:
            yield values_of(table[name])


def num_values(folder: Path, name: str) -> int | None:
    """Returns one more than the largest value of a column of whole numbers in all splits; None where there is none."""
    columns = (values for split in SPLITS for values, _ in columns_in(split_file(folder, split), name))
    largest = [int(values.max(initial=0)) if values.dtype.kind in "iu" else None for values in columns]
    return None if not largest or None in largest else 1 + max(each for each in largest if each is not None)


def some_rows(folder: Path, split: str, *, most: int) -> dict[str, list[Array] | Array]:
    """Returns at most `most` rows, evenly spread, of each column: [rows, ...], or a list of rows that differ."""
    table = open_split(folder, split)
    chosen = np.unique(np.linspace(0, table.num_rows - 1, min(most, table.num_rows)).astype(np.int64))
    return rows_by_column(TableRows(table)(chosen)) if len(chosen) else {}


def rows_by_column(table: Table) -> dict[str, list[Array] | Array]:
    """Returns the rows of each column of a table: [rows, ...], or a list of rows that differ."""
    result: dict[str, list[Array] | Array] = {}
    for name in table.column_names:
        values, lengths = values_of(table[name])
        result[name] = values if lengths is None else np.split(values, np.cumsum(lengths)[:-1])
    return result


def padded(values: Array, lengths: NDArray[np.int64], *, width: int, fill: int, pads_left: bool = False) -> Array:
    """Returns ragged rows, cut on the right or padded to `width`, on the right or on the left: [rows, ..., width]."""
    rows = np.full((len(lengths), width, *values.shape[1:]), fill, dtype=values.dtype)
    if lengths.max(initial=0) > width:
        places = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = values[places < width]
    rows[(np.arange(width) < lengths[:, None])[:, :: -1 if pads_left else 1]] = values
    return np.ascontiguousarray(np.moveaxis(rows, 1, -1))
