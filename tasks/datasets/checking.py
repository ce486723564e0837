"""Checks of the rows of a data set that a job reads, before anything starts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from ringmaster.codec import digest, to_json
from ringmaster.tasks.batch.faults import Finding
from ringmaster.tasks.datasets.catalogue import Entry
from ringmaster.tasks.datasets.columns import ColumnCheck, WrongColumn
from ringmaster.tasks.datasets.fingerprints import contents, fingerprint, rows_of_files, splits_of
from ringmaster.techniques.data.files import matching
from ringmaster.techniques.data.rows import FileText, format_of
from ringmaster.techniques.data.training_faults import SplitRows
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
    found: list[str] = []
    for split, path in splits_of(files).items():
        pattern = entry.location(path)
        try:
            found += [str(wrong) for wrong in _wrong_columns(pattern, entry)]
            if not _has_row(pattern, entry):
                found.append(f"{f'split {split}' if split else path} has no row")
        except ValueError as error:
            found.append(str(error))
    if files.digest is not None and not found:
        found += [message for message, _ in _other_content(entry, version)]
    return found


class _Question:
    """A cache key with its arguments, equal to another if neither the files nor their descriptions have changed."""

    def __init__(self, key: str, spec: DataSpec, entry: Entry) -> None:
        self.key, self.spec, self.entry = key, spec, entry

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=MOST_REMEMBERED)
def _faults(asked: _Question) -> tuple[tuple[str, str], ...]:
    spec, entry = asked.spec, asked.entry
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
        found = [*_row_faults(spec, label), *_other_content(entry, spec.version)]
    except ValueError as error:
        message, _, remedy = str(error).partition(". To fix: ")
        return ((f"{label}: {message}", remedy or "mend the file"),)
    return tuple(found)


def _row_faults(spec: DataSpec, label: str) -> Iterator[tuple[str, str]]:
    """Yields parts without a row, and rows that are both trained on and evaluated on."""
    source = data_source_of(spec)
    rows = source.rows(spec)
    if rows is None:
        return
    found = SplitRows.of(rows, identity=source.identity_of(spec))
    if not found.training:
        if spec.window:
            yield f"{label}: no row lies in the window {dict(spec.window)}", "widen the window, or name a newer version"
        else:
            yield f"{label}: there is no row to train on", "name a split with rows"
    if not found.held_out and (spec.held_out_path is not None or spec.held_out):
        split = f"split {spec.held_out_split}" if spec.held_out_split else "the share that is held out"
        yield f"{label}: {split} has no row", "name another split, raise held_out, or set it to 0"
    if leaks := found.leaks():
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
