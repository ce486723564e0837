"""The rows of the files that a job reads: those in its window, divided into training and held-out rows, and leaks.

A row is held out by the hash of its content, so that new data moves no old row to the other split. A window selects the
newest days, the last rows, or the rows between two times. Days count back from the newest row, not from now: the same
files give the same window at any time.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data import row_files
from ringmaster.techniques.data.file_patterns import FileRange, MatchedFiles, matching
from ringmaster.techniques.data_source import DataSource, PreparedData, Row
from ringmaster.techniques.job_specs import DataSpec

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

    def rows_of(several: Sequence[DataFile]) -> Iterator[Row]:
        return chain.from_iterable(rows_of_file(file, spec, reading) for file in several)

    main = rows_of(files)
    if spec.window:  # its rows may be more than memory holds, and are read twice
        has_times = needs_moments(spec.window)
        moments = (moment_of(row, column=spec.time_column) if has_times else math.nan for row in rows_of(files))
        main = compress(main, *rows_in_window([np.fromiter(moments, np.float64)], spec.window))
    yield from chain(main, rows_of(others))


@dataclass(frozen=True)
class DataFile:
    """A file that a job reads, or a part of it.

    held_out: whether its rows are held out; None where a share of them is.
    lines: the lines that are read; None for all.
    """

    path: str
    held_out: bool | None
    lines: FileRange | None = None


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
    path, is_split = file.path, file.held_out is None
    if row_files.format_of(path, spec.format) == "text":
        text = row_files.FileText(path)
        row = Row(file=path, number=1, value=text, content=reading.content(text, path), held_out=file.held_out is True)
        training, held_out = split_text(text, share=spec.held_out if is_split else 0.0)
        yield replace(row, content=training)
        if held_out is not None:
            yield replace(row, content=held_out, held_out=True)
        return
    for number, (value, content) in row_files.checked(_contents(file, spec, reading)):
        is_chosen = file.held_out is True
        if is_split:
            key = content if isinstance(content, str) else row_files.to_json_text(content)
            is_chosen = is_held_out(key, share=spec.held_out)
        yield Row(file=path, number=number, value=value, content=content, held_out=is_chosen)


def moment_of(row: Row, *, column: str | None) -> float:
    """Returns the time of a row in seconds since the epoch. Raises ValueError where it has none."""
    where = f"{row.file}, line {row.number}"
    if column is None or not isinstance(row.value, Mapping):
        raise ValueError(f"{where}: a window of time needs a column with the time. To fix: set time_column")
    try:
        return moment(row.value.get(column))
    except ValueError as error:
        raise ValueError(f"{where}, column {column!r}: {error}. To fix: correct it, or remove the row") from None


def files_of(spec: DataSpec) -> list[MatchedFiles]:
    """Returns the files to train on, and those to evaluate on where the spec names some."""
    patterns = [pattern for pattern in (spec.path, spec.held_out_path) if pattern is not None]
    result = [*map(matching, patterns)]
    for pattern, files in zip(patterns, result, strict=True):
        for name in files.names:
            try:
                row_files.format_of(name, spec.format)
            except ValueError as error:
                raise ValueError(f"path {pattern!r} matches files of unknown form: {error}") from None
    return result


def _contents(file: DataFile, spec: DataSpec, reading: RowReading) -> Iterator[tuple[int, Any]]:
    """The number of each row, with its value and content; a wrong row is a `RowError`."""
    # A named data set needs every column; otherwise Parquet reads only the columns in use.
    columns = None if spec.name is not None else reading.columns
    if columns is not None and spec.time_column is not None:  # of which the window reads the time
        columns = (*columns, spec.time_column)
    for number, value in row_files.rows_and_errors(file.path, format=spec.format, columns=columns, lines=file.lines):
        if isinstance(value, row_files.RowError):
            yield number, value
            continue
        place = f"{file.path}, line {number}"
        try:
            yield number, (value, reading.content(value, place))
        except ValueError as error:
            what, _, remedy = str(error).removeprefix(place).strip().partition(". To fix: ")
            yield number, row_files.RowError(place, what, remedy or "check the row")


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


def split_text(text: row_files.FileText, *, share: float) -> tuple[row_files.FileText, row_files.FileText | None]:
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
MAX_SECONDS = 1e11
"""No time of a row is so far from 1970: such a number is in milliseconds."""
FIRST_DATE, LAST_DATE = 1900_00_00, 2101_00_00
"""Whole numbers between these are dates of eight digits."""


def needs_moments(window: Mapping[str, Any] | None) -> bool:
    """Returns whether a window asks for the times of rows."""
    return any((window or {}).get(key) is not None for key in ("last_days", "since", "until"))


def rows_in_window(moments: Sequence[NDArray[np.float64]], window: Mapping[str, Any] | None) -> list[NDArray[np.bool_]]:
    """Returns which rows are in a window; without one, all.

    moments: the times of the rows of each part, [rows], in seconds since the epoch; of any value where the window asks
        for none. Days count back from the newest row of all parts.
    """
    window = window or {}
    lengths = [*map(len, moments)]
    if (num_last := window.get("last_rows")) is not None:
        first, ends = sum(lengths) - int(num_last), np.cumsum(lengths)
        return [np.arange(end - length, end) >= first for length, end in zip(lengths, ends, strict=True)]
    if not needs_moments(window):
        return [np.ones(length, bool) for length in lengths]
    first_s, last_s = moment(window.get("since"), -math.inf), moment(window.get("until"), math.inf)
    if (days := window.get("last_days")) is not None:
        first_s = max((float(each.max()) for each in moments if len(each)), default=0.0) - days * DAY_S
    return [(first_s <= each) & (each < last_s) for each in moments]


def moment(value: Any, default: float | None = None) -> float:
    """Converts a number of seconds, an ISO 8601 text or a date into seconds since the epoch; UTC without a time zone.

    A whole number such as 20260131 is that date, as the text "20260131" is, rather than a time in August 1970; also as
    a float, which whole numbers beside missing ones are in tables.

    Raises ValueError for other values. If `default` is given, it is the result for None.
    """
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or value is None:
        raise ValueError(f"{value!r} is not a valid time")
    if isinstance(value, (int, float)) and value == value // 1 and FIRST_DATE < value < LAST_DATE:
        value = f"{value:.0f}"
    if isinstance(value, (int, float)):
        if not abs(value) < MAX_SECONDS:  # also NaN
            raise ValueError(f"{value!r} is not a valid time: numbers are seconds since 1970, not milliseconds")
        return float(value)
    if hasattr(value, "isoformat"):
        value = value.isoformat()
    try:
        read = datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a valid time: write it as 2026-01-31 or 2026-01-31T12:00:00Z") from None
    return (read if read.tzinfo is not None else read.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True)
class LeakedRows:
    """Evaluated rows whose content is trained on. first: the place of the first of them, and of its like."""

    num_rows: int
    first: tuple[str, str]
    are_all: bool = False

    @property
    def fault(self) -> tuple[str, str]:
        """What is wrong, and how to mend it."""
        number = "1 row" if self.num_rows == 1 else f"{'all ' if self.are_all else ''}{self.num_rows} rows"
        place, like = self.first
        return (
            f"{number} of the evaluation split are among those that are trained on, the first at {place}, which is "
            f"{like}",
            "take them out of one of the two: what was trained on says nothing in an evaluation",
        )


class SplitRows:
    """The hashes and places of the rows of both splits, 21 bytes a row.

    identity: returns what equal rows have in common. num_rows: by whether they are held out.
    """

    def __init__(self, rows: Iterable[Row], *, identity: Callable[[Row], Any]) -> None:
        files: dict[str, int] = {}
        hashes, held_out, of_file, numbers = bytearray(), array("b"), array("I"), array("Q")
        for row in rows:
            hashes += row_files.hash_bytes(identity(row))
            held_out.append(row.held_out)
            of_file.append(files.setdefault(row.file, len(files)))
            numbers.append(row.number)
        self._hashes, self._held_out = np.frombuffer(bytes(hashes), dtype=np.uint64), np.array(held_out, dtype=bool)
        self._names, self._files, self._numbers = list(files), of_file, numbers
        num_held_out = int(self._held_out.sum())
        self.num_rows = {False: len(held_out) - num_held_out, True: num_held_out}

    def leaks(self) -> LeakedRows | None:
        """Returns the evaluated rows that are trained on, or None."""
        trained = np.flatnonzero(~self._held_out)
        leaked = np.flatnonzero(self._held_out & np.isin(self._hashes, self._hashes[trained]))
        if not len(leaked):
            return None
        like = trained[self._hashes[trained] == self._hashes[leaked[0]]][0]
        places = self._place(int(leaked[0])), self._place(int(like))
        return LeakedRows(len(leaked), places, are_all=len(leaked) == self.num_rows[True])

    def _place(self, index: int) -> str:
        return f"{self._names[self._files[index]]}, line {self._numbers[index]}"


def with_leaks(prepared: PreparedData, spec: DataSpec, source: DataSource) -> PreparedData:
    """Returns the description of data with what is wrong where rows are trained on and evaluated on.

    It is a fault where the spec names the files to evaluate on. Where whole files are held out of those that it names,
    it is for users to know: they may not be able to change it.
    """
    if spec.held_out_path is not None and (same := _same_file(spec)) is not None:
        fault = f"held_out_path {spec.held_out_path!r} has the same rows as path: it names {same}, too"
        remedy = "name other files in held_out_path, or leave it out: a share of the rows is then held out"
    elif leaks := SplitRows(source.rows(spec) or (), identity=source.identity_of(spec)).leaks():
        fault, remedy = leaks.fault
    else:
        return prepared
    if spec.held_out_path is None:
        return replace(prepared, notes=(*prepared.notes, fault))
    return replace(prepared, training_faults=(*prepared.training_faults, f"{fault}. To fix: {remedy}"))


def _same_file(spec: DataSpec) -> str | None:
    """A file to evaluate on that is also one to train on, by whatever path; None where there is none."""
    assert spec.path is not None and spec.held_out_path is not None
    trained = {key for key, _ in _local_files(matching(spec.path))}
    return next((path for key, path in _local_files(matching(spec.held_out_path)) if key in trained), None)


def _local_files(files: MatchedFiles) -> Iterator[tuple[tuple[int, int], str]]:
    for path in map(files.path, files.names):
        stat = Path(path).stat()
        yield (stat.st_dev, stat.st_ino), path
