"""Resolution of data set names in a job's data section to the paths that the trainer reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringmaster.tasks.batch.data_schema import DatasetVersion
from ringmaster.tasks.batch.faults import Finding, got
from ringmaster.tasks.batch.references import closest
from ringmaster.tasks.datasets.catalogue import Catalogue, Entry

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
    found = [
        Finding((key,), "is said by the data set", f"remove it here; it stands under datasets.{name}")
        for key in OF_THE_SET
        if raw.get(key) is not None
    ]
    version = _version(raw.get("version"), entry)
    if version is None:
        said = raw.get("version")
        remedy = closest(str(said), list(entry.versions), what="Its versions are")
        return raw, [*found, Finding(("version",), f"data set {name} has no version {said!r}", f"{remedy}, or latest")]
    files = entry.versions[version]
    split, held_out_split, wrong = _splits(raw, entry, files)
    if found or wrong:
        return raw, [*found, *wrong]
    dataset = entry.dataset
    said = {"path": entry.location(files.splits[split] if files.splits else files.path or "")}
    if held_out_split is not None:
        said["held_out_path"] = entry.location(files.splits[held_out_split])
    said |= {key: value for key in ("format", "time_column") if (value := getattr(dataset, key)) is not None}
    if dataset.text_column is not None and "text_column" not in raw:
        said["text_column"] = dataset.text_column
    kept = {key: value for key, value in raw.items() if key not in ("split", "held_out_split")}
    if files.splits:
        kept |= {"split": split} | ({"held_out_split": held_out_split} if held_out_split is not None else {})
    return {**kept, **said, "version": version}, []


def _version(said: Any, entry: Entry) -> str | None:
    """Returns the requested version, or None if it does not exist."""
    if said in (None, LATEST):
        return entry.latest
    return str(said) if str(said) in entry.versions else None


def _splits(raw: Mapping[str, Any], entry: Entry, files: DatasetVersion) -> tuple[str, str | None, list[Finding]]:
    """Returns the training split, the evaluation split, and their faults."""
    split, other = raw.get("split"), raw.get("held_out_split") or entry.dataset.held_out_split
    if not files.splits:
        found = [
            Finding((key,), f"data set {entry.name} has no splits", "remove it: a share is held out, see held_out")
            for key in ("split", "held_out_split")
            if raw.get(key) is not None
        ]
        return "", None, found
    split = split or ("train" if "train" in files.splits else next(iter(files.splits)))
    found = [
        Finding(
            (key,),
            f"data set {entry.name} has no split {name!r}",
            closest(str(name), list(files.splits), what="Its splits are"),
        )
        for key, name in (("split", split), ("held_out_split", other))
        if name is not None and name not in files.splits
    ]
    if not found and split == other:
        found = [Finding(("held_out_split",), f"is the split that is trained on, {got(split)}", "evaluate on another")]
    return str(split), other, found


def _unknown(name: str, catalogue: Catalogue) -> Finding:
    if not catalogue.entries:
        return Finding(
            ("name",), f"there is no data set {name!r}", "describe it under `datasets:`, or in datasets.yaml beside it"
        )
    return Finding(
        ("name",), f"there is no data set {name!r}", closest(name, list(catalogue.entries), what="There are")
    )
