"""The catalogue of data sets that jobs may name: those of a batch file, and those of a separate file next to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringmaster.files import is_file, path_in, text_of
from ringmaster.findings import Finding, Location, got
from ringmaster.tasks.batch import document, yaml_sections
from ringmaster.tasks.batch.document import place_text
from ringmaster.tasks.batch.schema import DatasetSection, DatasetVersion
from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.text import is_printable_name, shortened

FILE = "datasets.yaml"
"""The name of the catalogue file next to a batch file."""
FIRST = "1"
"""The version of a data set without named versions."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set and where it is described.

    folder: the folder to which the data set's paths are relative.
    at: the data set's place in a file.
    file: that file's name, if it is not the batch file.
    """

    name: str
    dataset: DatasetSection
    folder: Path
    at: Location = ()
    file: str = ""

    @property
    def versions(self) -> Mapping[str, DatasetVersion]:
        """All versions, the newest last."""
        return self.dataset.versions or {FIRST: DatasetVersion(**_own(self.dataset))}

    @property
    def latest(self) -> str:
        """The newest version, which is listed last."""
        return list(self.versions)[-1]

    def location(self, path: str) -> str:
        """Returns a path of the data set as an absolute path; a URL is returned unchanged."""
        try:
            return path if is_url(path) else str(path_in(self.folder, path))
        except ValueError:  # reported where a job names the data set
            return str(self.folder / path)


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Data sets by name, and the files that describe them, for messages."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    sources: tuple[str, ...] = ()


def catalogue_of(raw: Any, *, folder: Path) -> tuple[Catalogue, list[Finding]]:
    """Returns the data sets that a batch file may name, and the faults in their descriptions.

    raw: the value of `datasets:`: a mapping, the name of a file, or nothing. If no file is named, datasets.yaml in
    `folder` is read too, if it exists; entries of the batch file take precedence.
    """
    if raw is not None and not isinstance(raw, (str, Mapping)):
        message = f"must be a mapping of data sets, or the name of a file, {got(raw)}"
        return Catalogue(), [Finding(("datasets",), message, "write {reviews: {path: data/*.jsonl}}")]
    if isinstance(raw, str) and not is_file(folder, raw):
        message = f"there is no file {shortened(repr(raw), 200)}"
        return Catalogue(), [Finding(("datasets",), message, f"name a file such as {FILE}, relative to this one")]
    if isinstance(raw, str):
        return read_catalogue(path_in(folder, raw), at=("datasets",))
    own, result = _entries(raw if isinstance(raw, Mapping) else {}, folder=folder, at=("datasets",))
    other = Catalogue()
    if (folder / FILE).is_file():
        other, wrong = read_catalogue(folder / FILE, at=("datasets",))
        result += wrong
    return Catalogue(entries={**other.entries, **own}, sources=other.sources), result


def read_catalogue(file: Path, *, at: Location = ()) -> tuple[Catalogue, list[Finding]]:
    """Reads the data sets of a file with `datasets:`. Faults are reported at `at`, with their place in the message."""
    try:
        read = document.read(text_of(file))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return Catalogue(), [Finding(at, f"{file} cannot be read: {why}", f"name a file such as {FILE}")]
    raw = read.data.get("datasets") if isinstance(read.data, Mapping) else None
    result = list(read.findings)
    entries: dict[str, Entry] = {}
    if isinstance(raw, Mapping):
        entries, wrong = _entries(raw, folder=file.parent.resolve(), at=("datasets",))
        result += wrong
    elif not result:
        result.append(Finding((), "names no data sets", "start with `datasets:` and a name"))
    reported = [
        replace(f, place=at, message=_where(file, f.line or read.line(f.place), f.place, f.message), line=None)
        for f in result
    ]
    named = {name: replace(entry, file=file.name) for name, entry in entries.items()}
    return Catalogue(entries=named, sources=(str(file),)), reported


def _entries(raw: Mapping[str, Any], *, folder: Path, at: Location) -> tuple[dict[str, Entry], list[Finding]]:
    entries: dict[str, Entry] = {}
    result: list[Finding] = []
    for name, value in raw.items():
        place = (*at, name)
        try:
            dataset = DatasetSection.model_validate(value)
        except ValidationError as error:
            result += [replace(f, place=(*place, *f.place)) for f in yaml_sections.findings(error, root=DatasetSection)]
            continue
        if wrong := [each for each in (name, *dataset.versions) if not is_printable_name(each)]:
            message = f"has the name {shortened(repr(wrong[0]), 200)}"
            result.append(Finding(at, message, "use visible characters, at most 250, without blanks at the ends"))
            continue
        entry = Entry(name=name, dataset=dataset, folder=folder, at=place)
        result += _without_files(entry)
        entries[name] = entry
    return entries, result


def _without_files(entry: Entry) -> list[Finding]:
    """Returns a fault for each version that does not give its files in exactly one way."""
    if entry.dataset.versions and _own(entry.dataset):
        text = " and ".join(_own(entry.dataset))
        return [Finding(entry.at, f"has {text} in addition to versions", "move them into a version")]
    at = {version: (*entry.at, "versions", version) for version in entry.dataset.versions} or {FIRST: entry.at}
    return [
        Finding(at[version], "has both path and splits" if files.path else "does not say where its files are", REMEDY)
        for version, files in entry.versions.items()
        if (files.path is None) == (not files.splits)
    ]


REMEDY = "give either path or splits"


def _own(dataset: DatasetSection) -> dict[str, Any]:
    """Returns the file settings that a data set gives itself, not under a version."""
    fields = {"path": dataset.path, "splits": dataset.splits, "digest": dataset.digest}
    return {key: value for key, value in fields.items() if value}


def _where(file: Path, line: int | None, place: Location, message: str) -> str:
    where = ":".join(str(part) for part in (file.name, line) if part)
    return ": ".join(part for part in (where, place_text(place), message) if part)
