"""The rows of the files that a job reads: those in its window, divided into training and held-out rows.

A row is held out by the hash of its content, so that new data moves no old row to the other split. A window selects the
newest days, the last rows, or the rows between two times. Days count back from the newest row, not from now: the same
files give the same window at any time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from ringmaster.techniques.data.file_patterns import FilePart, MatchedFiles, matching
from ringmaster.techniques.data.row_files import (
    FileText,
    RowError,
    checked,
    format_of,
    rows_and_errors,
    to_json_text,
)
from ringmaster.techniques.data_source import Row
from ringmaster.techniques.job import DataSpec

TEXT_KINDS = (None, "language-modeling", "text")
"""The kinds of data that make one stream of tokens of all rows."""


@dataclass(frozen=True, kw_only=True)
class RowReading:
    """What a job reads of a row.

    columns: the columns that are needed; where the format allows it, others are not read. None for all.
    content: returns what is read of a row as a JSON value; called with the row and its place in messages. The row of a
        text file is a `FileText`.
    """

    columns: Sequence[str] | None
    content: Callable[[Any, str], Any]


def rows_of_files(spec: DataSpec, reading: RowReading) -> Iterator[Row]:
    """Yields every row that a job reads, local or at a URL, and whether it is held out.

    Without `held_out_path`, rows are held out by a hash of their content; several files of text for language modeling
    are split by file. A single text file is split at the line where its held-out share begins. The value and the
    content of a text file are a `FileText`, which is not read yet.

    Raises ValueError where files or rows cannot be read; the message has the first few wrong rows of a file.
    """
    files, others = data_files(spec)

    def main() -> Iterator[Row]:
        return chain.from_iterable(rows_of_file(file, spec, reading) for file in files)

    yield from in_window(main, spec.window, moment_s=partial(moment_of, column=spec.time_column))
    for file in others:
        yield from rows_of_file(file, spec, reading)


@dataclass(frozen=True)
class DataFile:
    """A file that a job reads, or a part of it.

    held_out: whether its rows are held out; None where a share of them is.
    part: the lines that are read; None for all.
    """

    path: str
    held_out: bool | None
    part: FilePart | None = None


def check_not_empty(files: Sequence[DataFile], *, where: str) -> None:
    """Raises ValueError where no file holds a byte."""
    if not any(Path(file.path).stat().st_size for file in files):
        what = f"{files[0].path} is empty" if len(files) == 1 else f"all {len(files)} files are empty"
        raise ValueError(f"{where} holds no text or rows: {what}. To fix: check what should have written them")


def data_files(spec: DataSpec) -> tuple[list[DataFile], list[DataFile]]:
    """Returns the files of `spec.path`, of which `spec.window` has the rows, and those of `spec.held_out_path`."""
    files, *others = files_of(spec)
    held_out: dict[str, bool] = {}
    if others:
        held_out = dict.fromkeys(files.names, False)
    elif len(files.names) > 1 and spec.kind in TEXT_KINDS:
        chosen = held_out_keys(files.names, share=spec.held_out)
        held_out = {name: name in chosen for name in files.names}
    main = [DataFile(files.path(name), held_out.get(name)) for name in files.names]
    return main, [DataFile(each.path(name), True) for each in others for name in each.names]


def rows_of_file(file: DataFile, spec: DataSpec, reading: RowReading) -> Iterator[Row]:
    """Yields the rows of one file, whatever the window, as `rows_of_files` does."""
    rows = _rows(file, spec, reading)
    return _split_rows(rows, spec) if file.held_out is None else rows


def moment_of(row: Row, *, column: str | None) -> float:
    """Returns the time of a row in seconds since the epoch. Raises ValueError where it has none."""
    where = f"{row.file}, line {row.number}"
    if column is None or not isinstance(row.value, Mapping):
        raise ValueError(f"{where}: a window of time needs a column with the time. To fix: set time_column")
    try:
        return moment(row.value.get(column))
    except ValueError as error:
        raise ValueError(f"{where}, column {column!r}: {error}") from None


def files_of(spec: DataSpec) -> list[MatchedFiles]:
    """Returns the files to train on, and those to evaluate on where the spec names some."""
    patterns = [pattern for pattern in (spec.path, spec.held_out_path) if pattern is not None]
    result = [*map(matching, patterns)]
    for pattern, files in zip(patterns, result, strict=True):
        for name in files.names:
            try:
                format_of(name, spec.format)
            except ValueError as error:
                raise ValueError(f"path {pattern!r} matches files of unknown form: {error}") from None
    return result


def _split_rows(rows: Iterator[Row], spec: DataSpec) -> Iterator[Row]:
    """The rows of a single file, with a share of them held out."""
    for row in rows:
        if isinstance(row.content, FileText):
            training, held_out = split_text(row.content, share=spec.held_out)
            yield replace(row, content=training)
            if held_out is not None:
                yield replace(row, content=held_out, held_out=True)
        else:
            key = row.content if isinstance(row.content, str) else to_json_text(row.content)
            yield replace(row, held_out=True) if is_held_out(key, share=spec.held_out) else row


def _rows(file: DataFile, spec: DataSpec, reading: RowReading) -> Iterator[Row]:
    path, held_out = file.path, file.held_out is True
    if format_of(path, spec.format) == "text":
        text = FileText(path)
        yield Row(file=path, number=1, value=text, content=reading.content(text, path), held_out=held_out)
        return
    for number, (value, content) in checked(_contents(file, spec, reading)):
        yield Row(file=path, number=number, value=value, content=content, held_out=held_out)


def _contents(file: DataFile, spec: DataSpec, reading: RowReading) -> Iterator[tuple[int, Any]]:
    """The number of each row, with its value and content; a wrong row is a `RowError`."""
    # A named data set needs every column; otherwise Parquet reads only the columns in use.
    columns = None if spec.name is not None else reading.columns
    if columns is not None and spec.time_column is not None:  # of which the window reads the time
        columns = (*columns, spec.time_column)
    for number, value in rows_and_errors(file.path, format=spec.format, columns=columns, part=file.part):
        if isinstance(value, RowError):
            yield number, value
            continue
        place = f"{file.path}, line {number}"
        try:
            yield number, (value, reading.content(value, place))
        except ValueError as error:
            what, _, remedy = str(error).removeprefix(place).strip().partition(". To fix: ")
            yield number, RowError(place, what, remedy or "check the row")


def is_held_out(key: str, *, share: float) -> bool:
    """Returns whether `key` falls into the held-out `share` (0..1) of all keys."""
    return _position(key) < share


def held_out_keys(keys: Sequence[str], *, share: float) -> frozenset[str]:
    """Returns those of several keys that are held out, by hash.

    If share > 0 and there are two keys or more, each split gets at least one.
    """
    ranked = sorted(set(keys), key=_position)
    count = sum(is_held_out(key, share=share) for key in ranked)
    if share > 0 and len(ranked) > 1:
        count = min(max(count, 1), len(ranked) - 1)
    return frozenset(ranked[:count])


def split_text(text: FileText, *, share: float) -> tuple[FileText, FileText | None]:
    """Returns the training part of a whole file and its held-out `share`, which begins with a line; None if empty."""
    if not share:
        return text, None
    length = sum(map(len, text.pieces()))
    end = round(length * (1 - share))
    line = place = 0
    for piece in replace(text, stop=end).pieces():
        line = place + result + 1 if (result := piece.rfind("\n")) >= 0 else line
        place += len(piece)
    cut = line or end
    return replace(text, stop=cut), replace(text, start=cut) if cut < length else None


def _position(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


DAY_S = 86_400.0

T = TypeVar("T")


def in_window(
    rows: Callable[[], Iterable[T]], window: Mapping[str, Any] | None, *, moment_s: Callable[[T], float]
) -> Iterator[T]:
    """Yields the rows that lie in a window, in order; without a window, all rows.

    rows: returns all rows, each time it is called.
    moment_s: the time of a row in seconds since the epoch; may raise ValueError.
    """
    if not window:
        yield from rows()
        return
    if (num_rows := window.get("last_rows")) is not None:
        # Counted first: the last rows may be more than memory holds.
        num_before = max(sum(1 for _ in rows()) - int(num_rows), 0)
        yield from islice(rows(), num_before, None)
        return
    first_s, last_s = time_limits(window, moments=(moment_s(row) for row in rows()))
    for row in rows():
        if first_s <= moment_s(row) < last_s:
            yield row


def time_limits(window: Mapping[str, Any], *, moments: Iterable[float]) -> tuple[float, float]:
    """Returns the first time of a window and the time at its end, in seconds since the epoch.

    moments: times of rows, the newest among them, from which days count back.
    """
    first_s, last_s = moment(window.get("since"), -math.inf), moment(window.get("until"), math.inf)
    if (days := window.get("last_days")) is not None:
        first_s = max(moments, default=0.0) - days * DAY_S
    return first_s, last_s


def moment(value: Any, default: float | None = None) -> float:
    """Converts a number of seconds, an ISO 8601 text or a date into seconds since the epoch; UTC without a time zone.

    Raises ValueError for other values. If `default` is given, it is the result for None.
    """
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or value is None:
        raise ValueError(f"{value!r} is not a valid time")
    if isinstance(value, (int, float)):
        return float(value)
    if hasattr(value, "isoformat"):
        value = value.isoformat()
    try:
        read = datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a valid time: write it as 2026-01-31 or 2026-01-31T12:00:00Z") from None
    return (read if read.tzinfo is not None else read.replace(tzinfo=UTC)).timestamp()
