"""Resolution of the data sets that a batch file's jobs name to the paths that the trainer reads, with all faults."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringmaster.codec import digest, from_json, set_fields
from ringmaster.tasks.batch.document import Finding, Place, got
from ringmaster.tasks.batch.references import closest
from ringmaster.tasks.batch.schema import Data, DatasetVersion
from ringmaster.tasks.datasets.catalogue import Catalogue, Entry, catalogue_of
from ringmaster.tasks.datasets.checking import data_findings
from ringmaster.techniques.job import DataSpec

NOT_READ = frozenset({"seq_len", "vocab_size", "tokenizer", "padding", "sampling", "packing"})
"""The fields that do not affect which rows of a data set are read, nor what is checked in them."""


@dataclass(init=False)
class NamedData:
    """The catalogue of a batch file, and the faults in it and in its use by the jobs.

    findings: grows while jobs are resolved. A data set's rows are checked once for each distinct way of reading them.
    """

    catalogue: Catalogue
    findings: list[Finding] = field(default_factory=list)

    def __init__(self, raw: Any, *, folder: Path) -> None:
        self.catalogue, self.findings = catalogue_of(raw, folder=folder)
        self._folder = folder
        self._seen: set[str] = set()
        self._resolved: set[Place] = set()

    def with_files(self, job: Any, *, origin: Callable[[Place], Place]) -> Any:
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
        return [replace(f, place=(*f.place[:-1], "name")) if self._is_file(f.place) else f for f in findings]

    def _is_file(self, place: Place) -> bool:
        return place[-1:] in (("path",), ("held_out_path",)) and place[:-1] in self._resolved

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


def resolved(raw: Any, catalogue: Catalogue) -> tuple[Any, list[Finding]]:
    """Returns a job's data with the files of its named data set, and the faults, at places relative to the data.

    Data that names no data set, has its paths already, or cannot be resolved is returned unchanged.
    """
    if not isinstance(raw, Mapping) or not isinstance(name := raw.get("name"), str) or raw.get("path") is not None:
        return raw, []
    entry = catalogue.entries.get(name)
    if entry is None:
        return raw, [_unknown(name, catalogue)]
    result = [
        Finding((key,), "is said by the data set", f"remove it here; it stands under datasets.{name}")
        for key in OF_THE_SET
        if raw.get(key) is not None
    ]
    version = _version(raw.get("version"), entry)
    if version is None:
        fields = raw.get("version")
        remedy = closest(str(fields), list(entry.versions), what="Its versions are")
        return raw, [
            *result,
            Finding(("version",), f"data set {name} has no version {fields!r}", f"{remedy}, or latest"),
        ]
    files = entry.versions[version]
    split, held_out_split, wrong = _splits(raw, entry, files)
    if result or wrong:
        return raw, [*result, *wrong]
    dataset = entry.dataset
    fields = {"path": entry.location(files.splits[split] if files.splits else files.path or "")}
    if held_out_split is not None:
        fields["held_out_path"] = entry.location(files.splits[held_out_split])
    fields |= {key: value for key in ("format", "time_column") if (value := getattr(dataset, key)) is not None}
    if dataset.text_column is not None and "text_column" not in raw:
        fields["text_column"] = dataset.text_column
    kept = {key: value for key, value in raw.items() if key not in ("split", "held_out_split")}
    if files.splits:
        kept |= {"split": split} | ({"held_out_split": held_out_split} if held_out_split is not None else {})
    return {**kept, **fields, "version": version}, []


def _version(given: Any, entry: Entry) -> str | None:
    """Returns the requested version, or None if it does not exist."""
    if given in (None, LATEST):
        return entry.latest
    return str(given) if str(given) in entry.versions else None


def _splits(raw: Mapping[str, Any], entry: Entry, files: DatasetVersion) -> tuple[str, str | None, list[Finding]]:
    """Returns the training split, the evaluation split, and their faults."""
    split, other = raw.get("split"), raw.get("held_out_split") or entry.dataset.held_out_split
    if not files.splits:
        result = [
            Finding((key,), f"data set {entry.name} has no splits", "remove it: a share is held out, see held_out")
            for key in ("split", "held_out_split")
            if raw.get(key) is not None
        ]
        return "", None, result
    split = split or ("train" if "train" in files.splits else next(iter(files.splits)))
    result = [
        Finding(
            (key,),
            f"data set {entry.name} has no split {name!r}",
            closest(str(name), list(files.splits), what="Its splits are"),
        )
        for key, name in (("split", split), ("held_out_split", other))
        if name is not None and name not in files.splits
    ]
    if not result and split == other:
        result = [Finding(("held_out_split",), f"is the split that is trained on, {got(split)}", "evaluate on another")]
    return str(split), other, result


def _unknown(name: str, catalogue: Catalogue) -> Finding:
    if not catalogue.entries:
        return Finding(
            ("name",), f"there is no data set {name!r}", "describe it under `datasets:`, or in datasets.yaml beside it"
        )
    return Finding(
        ("name",), f"there is no data set {name!r}", closest(name, list(catalogue.entries), what="There are")
    )
