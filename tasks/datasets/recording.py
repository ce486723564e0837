"""Recording of a job's data with its model: data set, version, split, window and rows."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json
from ringmaster.model_lineage.records import DatasetInput
from ringmaster.techniques.data.arrow_files import fingerprint
from ringmaster.techniques.data.encoded_rows import MANIFEST, RowManifest
from ringmaster.techniques.job import DataSpec

ROWS = f"data/{MANIFEST}"
"""The artifact of a job's run with the content hashes of the rows that were read."""


def dataset_inputs(spec: DataSpec, prepared: Mapping[str, Any]) -> list[DatasetInput]:
    """Returns the data that a model was trained and evaluated on. prepared: the JSON form of its `PreparedData`."""
    if parts := prepared.get("parts"):
        each = (dataset_inputs(from_json(DataSpec, part["job"]["data"]), part["data"]) for part in parts)
        return list(dict.fromkeys(chain.from_iterable(each)))
    if not prepared["num_samples"]:  # a command that reads its own data reports none
        return []
    rows = manifest_of(prepared)
    window = ", ".join(f"{key}: {value}" for key, value in (spec.window or {}).items() if value is not None)
    sides = (
        ("training", "training", prepared["num_samples"], spec.split, window),
        ("evaluation", "held_out", prepared["num_held_out"], spec.held_out_split, ""),
    )
    # Rows that are held out of the same files are part of the same data; other files are other data.
    evaluated = {"name": prepared["name"], "digest": prepared["digest"]}
    if spec.held_out_path is not None or spec.held_out_split is not None:
        evaluated["digest"] = _held_out_digest(prepared)
    if spec.held_out_path is not None and spec.version is None:
        evaluated["name"] = spec.held_out_path
    has_splits = spec.version is not None or spec.held_out_split is not None
    return [
        DatasetInput(
            name=prepared["name"] if side == "training" else evaluated["name"],
            digest=prepared["digest"] if side == "training" else evaluated["digest"],
            source=prepared["source"] if side == "training" else spec.held_out_path or prepared["source"],
            context=context,
            num_rows=num_samples,
            version=spec.version,
            split=split if has_splits else None,
            window=(text if spec.held_out_path is not None else window) or None,
            rows_digest=None if rows is None else rows.digest(side),
        )
        for context, side, num_samples, split, text in sides
    ]


def _held_out_digest(prepared: Mapping[str, Any]) -> str:
    """Returns the digest of the held-out samples alone; of all samples where another machine holds the data."""
    from ringmaster.techniques.data.stored_source import DESCRIPTION  # imports torch

    folder = Path(prepared["folder"])
    is_here = bool(prepared["folder"]) and (folder / DESCRIPTION).is_file()
    return fingerprint(folder, splits=("held_out",)) if is_here else str(prepared["digest"])


def manifest_of(prepared: Mapping[str, Any]) -> RowManifest | None:
    """Returns the manifest of the prepared rows; None for unnamed data, or if another machine holds the data."""
    return RowManifest.read(Path(prepared["folder"])) if prepared.get("folder") else None


def rows_text(prepared: Mapping[str, Any]) -> str | None:
    """Returns the content hashes of the rows as JSON, for the artifact `ROWS`; None if they are unknown.

    The columns that were hashed stand beside them, where a sample is made of several.
    """
    rows = manifest_of(prepared)
    if rows is None:
        return None
    columns = list(dict.fromkeys(column for _, column in prepared.get("columns", ())))
    return json.dumps({**rows.to_json(), **({"columns": columns} if columns else {})})
