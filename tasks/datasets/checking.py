"""Checks of the rows of data sets before anything starts: declared columns, leaks, and fingerprints of the content.

A fingerprint does not depend on the order of rows or on their division into files.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ringmaster.codec import digest, to_json
from ringmaster.errors import InputError
from ringmaster.tasks.batch.document import Fault, Finding, got, place_text, read
from ringmaster.tasks.batch.schema import DatasetVersion
from ringmaster.tasks.datasets.catalogue import Catalogue, Entry, catalogue_of
from ringmaster.tasks.files import text_of
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.data.file_patterns import matching
from ringmaster.techniques.data.file_rows import SplitRows, moment
from ringmaster.techniques.data.row_files import FileText, format_of, read_rows
from ringmaster.techniques.data_source import data_source_of
from ringmaster.techniques.job import DataSpec

MOST_REMEMBERED = 256


def data_findings(spec: DataSpec, entry: Entry) -> list[Finding]:
    """Returns the faults in the rows that a job reads from a data set, at places relative to the job's data.

    Files that have not changed since this process last read them are not read again.
    """
    assert spec.path is not None and spec.version is not None
    try:
        states = [matching(path).state() for path in (spec.path, spec.held_out_path) if path is not None]
    except ValueError:  # reported where the files are resolved
        return []
    remembered = digest([to_json(spec), entry.dataset.model_dump(), states])
    return [Finding(("name",), message, remedy) for message, remedy in _faults(_Question(remembered, spec, entry))]


def version_faults(entry: Entry, version: str) -> list[str]:
    """Returns the faults of a whole version: its files, its rows, and its fingerprint if one is given."""
    files = entry.versions[version]
    result: list[str] = []
    for split, path in splits_of(files).items():
        pattern = entry.location(path)
        try:
            result += [str(wrong) for wrong in _wrong_columns(pattern, entry)]
            if not _has_row(pattern, entry):
                result.append(f"{f'split {split}' if split else path} has no row")
        except ValueError as error:
            result.append(str(error))
    if files.digest is not None and not result:
        result += [message for message, _ in _other_content(entry, version)]
    return result


class _Question:
    """A cache key with its arguments, equal to another if neither the files nor their descriptions have changed."""

    def __init__(self, key: str, spec: DataSpec, entry: Entry) -> None:
        self.key, self.spec, self.entry = key, spec, entry

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=MOST_REMEMBERED)
def _faults(request: _Question) -> tuple[tuple[str, str], ...]:
    spec, entry = request.spec, request.entry
    assert spec.version is not None
    label = f"data set {entry.name} {spec.version}"
    try:
        wrong = [
            column
            for path in (spec.path, spec.held_out_path)
            if path is not None
            for column in _wrong_columns(path, entry)
        ]
        if wrong:
            return tuple((f"{label}: {column}", "mend the rows, or what `columns` says") for column in wrong)
        result = [*_row_faults(spec, label), *_other_content(entry, spec.version)]
    except ValueError as error:
        message, _, remedy = str(error).partition(". To fix: ")
        return ((f"{label}: {message}", remedy or "mend the file"),)
    return tuple(result)


def _row_faults(spec: DataSpec, label: str) -> Iterator[tuple[str, str]]:
    """Yields parts without a row, and rows that are both trained on and evaluated on."""
    source = data_source_of(spec)
    rows = source.rows(spec)
    if rows is None:
        return
    result = SplitRows(rows, identity=source.identity_of(spec))
    if not result.num_rows[False]:
        if spec.window:
            yield f"{label}: no row lies in the window {dict(spec.window)}", "widen the window, or name a newer version"
        else:
            yield f"{label}: there is no row to train on", "name a split with rows"
    if not result.num_rows[True] and (spec.held_out_path is not None or spec.held_out):
        split = f"split {spec.held_out_split}" if spec.held_out_split else "the share that is held out"
        yield f"{label}: {split} has no row", "name another split, raise held_out, or set it to 0"
    if leaks := result.leaks():
        message, remedy = leaks.fault
        yield f"{label}: {message}", remedy


def _other_content(entry: Entry, version: str) -> Iterator[tuple[str, str]]:
    """Yields a fault if the content of a version does not match the fingerprint in its description."""
    wanted = entry.versions[version].digest
    if wanted is not None and (there := fingerprint(contents(entry, version))) != wanted:
        message = f"data set {entry.name} {version}: its content is {there}, and not {wanted}: it has changed"
        yield message, "make what has changed another version, or bring back its files"


def _has_row(pattern: str, entry: Entry) -> bool:
    """Whether a pattern has a row. The first text file is read to its end: it may be no text."""
    first = next((row for _, _, row in rows_of_files(pattern, format=entry.dataset.format)), None)
    if isinstance(first, FileText):
        deque(first.pieces(), maxlen=0)
    return first is not None


def _wrong_columns(pattern: str, entry: Entry) -> list[WrongColumn]:
    dataset = entry.dataset
    if not dataset.columns:
        return []
    check = ColumnCheck(dataset.columns)
    for file, number, row in rows_of_files(pattern, format=dataset.format):
        check.is_text = format_of(file, dataset.format) == "csv"
        content = next(row.pieces(), "") if isinstance(row, FileText) else row
        check.look(content, file=file, number=number)
    return list(check.faults())


WORDS = {
    "text": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "time": "a time, such as 2026-01-31T12:00:00Z",
    "tokens": "a list of token ids",
}


@dataclass(kw_only=True)
class WrongColumn:
    """Rows that violate the declaration of a column. where: the file and line of the first one."""

    column: str
    where: str
    message: str
    num_rows: int = 1

    def __str__(self) -> str:
        others = f" (and {self.num_rows - 1} rows more)" if self.num_rows > 1 else ""
        return f"{self.where}: column {self.column!r} {self.message}{others}"


@dataclass
class ColumnCheck:
    """Checks the rows of some files. columns: types by name, see `tasks.batch.references.COLUMN_TYPES`."""

    columns: Mapping[str, str]
    is_text: bool = False  # CSV: every value is text and is parsed as its declared type
    wrong: dict[str, WrongColumn] = field(default_factory=dict)

    def look(self, row: Any, *, file: str, number: int) -> None:
        """Checks a row and records its faults."""
        if not isinstance(row, Mapping):
            self._note("*", f"{file}, line {number}", f"cannot be checked: the row is no object, {got(row)}")
            return
        for column, value in self.columns.items():
            if message := self._fault(row, column, value):
                self._note(column, f"{file}, line {number}", message)

    def faults(self) -> Iterable[WrongColumn]:
        """Returns the faults found, one per column."""
        return self.wrong.values()

    def _fault(self, row: Mapping[str, Any], column: str, column_type: str) -> str:
        kind, may_lack = column_type.removesuffix("?"), column_type.endswith("?")
        value = row.get(column)
        if value is None or (self.is_text and value == "" and kind != "text"):
            if may_lack:
                return ""
            return "is null" if column in row else f"is missing; the row has {', '.join(sorted(row))}"
        return "" if kind == "any" or self._is(kind, value) else f"must be {WORDS[kind]}, {got(value)}"

    def _is(self, kind: str, value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        match kind:
            case "text":
                return isinstance(value, str)
            case "integer":
                return (is_number and float(value).is_integer()) or (self.is_text and _reads(int, value))
            case "number":
                return is_number or (self.is_text and _reads(float, value))
            case "boolean":
                return isinstance(value, bool) or (self.is_text and str(value).lower() in ("true", "false"))
            case "tokens":
                return isinstance(value, list) and all(isinstance(token, int) for token in value)
        return _reads(moment, value)

    def _note(self, column: str, where: str, message: str) -> None:
        if column in self.wrong:
            self.wrong[column].num_rows += 1
        else:
            self.wrong[column] = WrongColumn(column=column, where=where, message=message)


def _reads(read: Any, value: Any) -> bool:
    try:
        read(value)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a split. path: as the data set gives it. digest: of the rows."""

    path: str
    num_files: int
    num_rows: int
    digest: str


def rows_of_files(pattern: str, *, format: str | None) -> Iterator[tuple[str, int, Any]]:
    """Yields (file, number, row) of all files of a pattern; the row of a text file is not read yet.

    Raises ValueError if a file cannot be read.
    """
    result = matching(pattern)
    for path in map(result.path, result.names):
        if format_of(path, format) == "text":
            yield path, 1, FileText(path)
        else:
            for number, row in read_rows(path, format=format):
                yield path, number, row


def splits_of(files: DatasetVersion) -> Mapping[str, str]:
    """Returns the paths of a version by split; the key is "" for a version without splits."""
    return files.splits or {"": files.path or ""}


def contents(entry: Entry, version: str) -> dict[str, Content]:
    """Returns the content of each split of a version. Raises ValueError if a file cannot be read."""
    result = {}
    for split, path in splits_of(entry.versions[version]).items():
        pattern = entry.location(path)
        manifest = RowManifest.of((row, False) for _, _, row in rows_of_files(pattern, format=entry.dataset.format))
        num_files, num_rows = len(matching(pattern).names), len(manifest.rows["training"])
        result[split] = Content(path=path, num_files=num_files, num_rows=num_rows, digest=manifest.digest("training"))
    return result


def fingerprint(contents: Mapping[str, Content]) -> str:
    """Returns the combined digest of all splits."""
    if len(contents) == 1:
        return next(iter(contents.values())).digest
    text = " ".join(f"{split} {content.digest}" for split, content in sorted(contents.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rows_of(entry: Entry) -> list[dict[str, Any]]:
    """Returns a row for each split of each version; what cannot be read has its fault there."""
    rows: list[dict[str, Any]] = []
    for version in entry.versions:
        label = {"name": entry.name, "version": version}
        try:
            result = contents(entry, version)
        except ValueError as error:
            empty = {"split": "", "num_files": 0, "num_rows": 0, "digest": "", "version_digest": "", "path": ""}
            rows.append({**label, **empty, "fault": str(error)})
            continue
        whole = fingerprint(result)
        rows += [
            {**label, "split": split, **vars(content), "version_digest": whole, "fault": ""}
            for split, content in result.items()
        ]
    return rows


def read_catalogue(file: Path) -> tuple[Catalogue, dict[str, Any], list[str]]:
    """Returns the data sets that a file may name, its plain values, and what is wrong with how they are described.

    Raises InputError where there are no data sets.
    """
    try:
        document = read(text_of(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([f"{file} cannot be read: {error}. To fix: name a file with `datasets:`"]) from error
    raw = document.data if isinstance(document.data, dict) else {}
    catalogue, result = catalogue_of(raw.get("datasets"), folder=file.parent.resolve())
    placed = [(place_text(f.place), f.line or document.line(f.place), f) for f in [*document.findings, *result]]
    faults = [str(Fault(place, line, f.message, f.remedy, file.name)) for place, line, f in placed]
    if not catalogue.entries:
        raise InputError(faults or [f"{file} has no data sets. To fix: describe them under `datasets:`"])
    return catalogue, raw, faults
