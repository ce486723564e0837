"""How the data of a job is recorded with its model: which data set, version, split and window, and which rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringmaster.model_lineage.records import DatasetInput
from ringmaster.techniques.engine.data.manifest import FILE, Manifest
from ringmaster.techniques.job import DataSpec

ROWS = f"data/{FILE}"
"""The artifact of a job's run with the content hashes of the rows that it has read."""


def dataset_inputs(spec: DataSpec, prepared: Mapping[str, Any]) -> list[DatasetInput]:
    """What a model was trained and evaluated on. prepared: the JSON form of its `PreparedData`."""
    if not prepared["num_samples"]:  # a command that reads its own data does not say which
        return []
    rows = manifest_of(prepared)
    window = ", ".join(f"{key}: {value}" for key, value in (spec.window or {}).items() if value is not None)
    sides = (
        ("training", "training", prepared["num_samples"], spec.split, window),
        ("evaluation", "held_out", prepared["num_held_out"], spec.held_out_split, ""),
    )
    return [
        DatasetInput(
            name=prepared["name"],
            digest=prepared["digest"],
            source=prepared["source"] if side == "training" else spec.held_out_path or prepared["source"],
            context=context,
            num_rows=num_samples,
            version=spec.version,
            split=split if spec.version is not None else None,
            window=(said if spec.held_out_path is not None else window) or None,
            rows_digest=None if rows is None else rows.digest(side),
        )
        for context, side, num_samples, split, said in sides
    ]


def manifest_of(prepared: Mapping[str, Any]) -> Manifest | None:
    """Which rows were prepared; None for data without a name, or where another machine has them."""
    return Manifest.read(Path(prepared["folder"])) if prepared.get("folder") else None


def rows_text(prepared: Mapping[str, Any]) -> str | None:
    """The content hashes of the rows as JSON, for the artifact `ROWS`; None where they are not known."""
    rows = manifest_of(prepared)
    return None if rows is None else json.dumps(rows.to_json())
