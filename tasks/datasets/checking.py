"""Checks of the data sets that jobs name before anything starts: their files, declared columns, leaks and fingerprints.

The names of a batch file's jobs are resolved to the paths that the trainer reads, with all faults.

A fingerprint does not depend on the order of rows or on their division into files.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringmaster.codec import digest, from_json, set_fields, to_json
from ringmaster.errors import InputError
from ringmaster.findings import Finding, Location, got
from ringmaster.tasks.batch.document import Fault, place_text
from ringmaster.tasks.batch.references import closest
from ringmaster.tasks.batch.schema import Data, DatasetVersion
from ringmaster.tasks.batch.yaml_sections import read_document
from ringmaster.tasks.datasets.catalogue import Catalogue, Entry, catalogue_of
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.data.file_patterns import matching
from ringmaster.techniques.data.file_rows import SplitRows, moment
from ringmaster.techniques.data.row_files import FileText, format_of, read_rows
from ringmaster.techniques.data_source import data_source_of
from ringmaster.techniques.job_specs import DataSpec

MAX_REMEMBERED = 256


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
            result += _wrong_columns(pattern, entry)
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


@lru_cache(maxsize=MAX_REMEMBERED)
def _faults(request: _Question) -> tuple[tuple[str, str], ...]:
    spec, entry = request.spec, request.entry
    assert spec.version is not None
    label, paths = f"data set {entry.name} {spec.version}", filter(None, (spec.path, spec.held_out_path))
    try:
        if wrong := [column for path in paths for column in _wrong_columns(path, entry)]:
            return tuple((f"{label}: {column}", "correct the rows, or `columns`") for column in wrong)
        return (*_row_faults(spec, label), *_other_content(entry, spec.version))
    except ValueError as error:
        message, _, remedy = str(error).partition(". To fix: ")
        return ((f"{label}: {message}", remedy or "mend the file"),)


def _row_faults(spec: DataSpec, label: str) -> Iterator[tuple[str, str]]:
    """Yields parts without a row, and rows that are both trained on and evaluated on."""
    source = data_source_of(spec)
    if (rows := source.rows(spec)) is None:
        return
    result = SplitRows(rows, identity=source.identity_of(spec))
    if not result.num_rows[False] and spec.window:
        yield f"{label}: no row lies in the window {dict(spec.window)}", "widen the window, or name a newer version"
    elif not result.num_rows[False]:
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


def _wrong_columns(pattern: str, entry: Entry) -> list[str]:
    """Returns the columns whose declarations rows violate, each with the first such row."""
    dataset = entry.dataset
    first, num_rows = dict[str, str](), Counter[str]()
    for file, number, row in rows_of_files(pattern, format=dataset.format) if dataset.columns else ():
        content = next(row.pieces(), "") if isinstance(row, FileText) else row
        for column, message in _column_faults(
            content, dataset.columns, is_csv=format_of(file, dataset.format) == "csv"
        ):
            first.setdefault(column, f"{file}, line {number}: column {column!r} {message}")
            num_rows[column] += 1
    more = {column: f" (and {number - 1} rows more)" if number > 1 else "" for column, number in num_rows.items()}
    return [f"{text}{more[column]}" for column, text in first.items()]


def _column_faults(row: Any, columns: Mapping[str, str], *, is_csv: bool) -> Iterator[tuple[str, str]]:
    """Yields the columns of a row that violate their declarations, with what is wrong.

    columns: types by name, see `tasks.batch.references.COLUMN_TYPES`.
    is_csv: whether every value is text and is parsed as its declared type.
    """
    if not isinstance(row, Mapping):
        yield "*", f"cannot be checked: the row is not an object, {got(row)}"
        return
    for column, column_type in columns.items():
        kind, value = column_type.removesuffix("?"), row.get(column)
        if value is None or (is_csv and value == "" and kind != "text"):
            if not column_type.endswith("?"):
                there = ", ".join(sorted(row))
                yield column, "is null" if column in row else f"is missing; the row has {there}"
        elif not _is_of(kind, value, is_csv=is_csv):
            yield column, f"must be {WORDS[kind]}, {got(value)}"


def _is_of(kind: str, value: Any, *, is_csv: bool) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match kind:
        case "any":
            return True
        case "text":
            return isinstance(value, str)
        case "integer":
            return (is_number and float(value).is_integer()) or (is_csv and _reads(int, value))
        case "number":
            return is_number or (is_csv and _reads(float, value))
        case "boolean":
            return isinstance(value, bool) or (is_csv and str(value).lower() in ("true", "false"))
        case "tokens":
            return isinstance(value, list) and all(isinstance(token, int) for token in value)
    return _reads(moment, value)


WORDS = {
    "text": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "time": "a time, such as 2026-01-31T12:00:00Z",
    "tokens": "a list of token ids",
}


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
    document = read_document(file, what="a file with `datasets:`")
    raw = document.data if isinstance(document.data, dict) else {}
    catalogue, result = catalogue_of(raw.get("datasets"), folder=file.parent.resolve())
    placed = [(place_text(f.place), f.line or document.line(f.place), f) for f in [*document.findings, *result]]
    faults = [str(Fault(place, line, f.message, f.remedy, file.name)) for place, line, f in placed]
    if not catalogue.entries:
        raise InputError(faults or [f"{file} has no data sets. To fix: describe them under `datasets:`"])
    return catalogue, raw, faults


NOT_READ = frozenset({"seq_len", "vocab_size", "tokenizer", "padding", "sampling", "packing"})
"""The fields that do not affect which rows of a data set are read, nor what is checked in them."""


class NamedData:
    """The catalogue of a batch file, and the faults in it and in its use by the jobs.

    findings: grows while jobs are resolved. A data set's rows are checked once for each distinct way of reading them.
    """

    def __init__(self, raw: Any, *, folder: Path) -> None:
        self.catalogue, self.findings = catalogue_of(raw, folder=folder)
        self._folder, self._seen, self._resolved = folder, set[str](), set[Location]()

    def with_files(self, job: Any, *, origin: Callable[[Location], Location]) -> Any:
        """Returns a job's plain values with the files of its named data set; adds faults to the findings.

        origin: maps places of the job to places in the file.
        """
        data = job.get("data") if isinstance(job, Mapping) else None
        if not isinstance(data, Mapping):
            return job
        resolved_data, wrong = resolved(data, self.catalogue)
        if resolved_data is not data:
            self._resolved.add(origin(("data",)))
            wrong += self._rows(resolved_data)
        self.findings += [replace(finding, place=origin(("data", *finding.place))) for finding in wrong]
        return {**job, "data": resolved_data}

    def named(self, findings: Iterable[Finding]) -> list[Finding]:
        """Returns findings about the files of named data sets, moved to the place of the name in the job."""
        return [
            replace(each, place=(*each.place[:-1], "name"))
            if each.place[-1:] in (("path",), ("held_out_path",)) and each.place[:-1] in self._resolved
            else each
            for each in findings
        ]

    def _rows(self, data: Mapping[str, Any]) -> list[Finding]:
        try:
            entry = Data.model_validate(data, context={"folder": self._folder})
        except ValidationError:  # reported by the validation of the job
            return []
        spec = from_json(DataSpec, entry.model_dump(exclude_unset=True))
        key = digest(set_fields(spec, but=NOT_READ))
        if key in self._seen:
            return []
        self._seen.add(key)
        return data_findings(spec, self.catalogue.entries[data["name"]])


LATEST = "latest"
OF_THE_SET = ("format", "time_column", "held_out_path")
"""The keys that only the catalogue may set for a named data set."""


def resolved(raw: Mapping[str, Any], catalogue: Catalogue) -> tuple[Mapping[str, Any], list[Finding]]:
    """Returns a job's data with the files of its named data set, and the faults, at places relative to the data.

    Data that names no data set, has its paths already, or cannot be resolved is returned unchanged.
    """
    if not isinstance(name := raw.get("name"), str) or raw.get("path") is not None:
        return raw, []
    entry = catalogue.entries.get(name)
    if entry is None:
        known = list(catalogue.entries)
        description_remedy = "describe it under `datasets:`, or in datasets.yaml next to it"
        remedy = closest(name, known, what="There are") if known else description_remedy
        return raw, [Finding(("name",), f"there is no data set {name!r}", remedy)]
    result = [
        Finding((key,), "is set by the data set", f"remove it here; it is under datasets.{name}")
        for key in OF_THE_SET
        if raw.get(key) is not None
    ]
    given = raw.get("version")
    version = entry.latest if given in (None, LATEST) else str(given)
    if version not in entry.versions:
        remedy = closest(version, list(entry.versions), what="Its versions are")
        return raw, [
            *result,
            Finding(("version",), f"data set {name} has no version {given!r}", f"{remedy}, or latest"),
        ]
    files, dataset = entry.versions[version], entry.dataset
    splits, wrong = _splits(raw, entry, files)
    if result or wrong:
        return raw, [*result, *wrong]
    paths = {key: entry.location(files.splits[split]) for key, split in splits.items()} or {
        "split": entry.location(files.path or "")
    }
    fields = {
        key: paths[split] for key, split in (("path", "split"), ("held_out_path", "held_out_split")) if split in paths
    }
    fields |= {key: value for key in ("format", "time_column") if (value := getattr(dataset, key)) is not None}
    if dataset.text_column is not None and "text_column" not in raw:
        fields["text_column"] = dataset.text_column
    kept = {key: value for key, value in raw.items() if key not in ("split", "held_out_split")}
    return {**kept, **splits, **fields, "version": version}, []


def _splits(raw: Mapping[str, Any], entry: Entry, files: DatasetVersion) -> tuple[dict[str, str], list[Finding]]:
    """Returns the training split and the evaluation split, if any, by their keys, and their faults."""
    given = {"split": raw.get("split"), "held_out_split": raw.get("held_out_split")}
    if not files.splits:
        remedy = "remove it: a share is held out, see held_out"
        problem = f"data set {entry.name} has no splits"
        return {}, [Finding((key,), problem, remedy) for key, split in given.items() if split is not None]
    first = "train" if "train" in files.splits else next(iter(files.splits))
    defaults = {"split": first, "held_out_split": entry.dataset.held_out_split}
    splits = {key: split for key in given if (split := given[key] or defaults[key]) is not None}
    result = [
        Finding(
            (key,),
            f"data set {entry.name} has no split {name!r}",
            closest(str(name), list(files.splits), what="Its splits are"),
        )
        for key, name in splits.items()
        if name not in files.splits
    ]
    if not result and splits["split"] == splits.get("held_out_split"):
        problem = f"is the split that is trained on, {got(splits['split'])}"
        result = [Finding(("held_out_split",), problem, "evaluate on another")]
    return splits, result
