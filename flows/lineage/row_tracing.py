"""Search for the models that have read a row, by the content hashes that jobs store for named data sets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ringmaster.flows.faults import InputError, input_errors
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage import LedgerError
from ringmaster.tasks.datasets.recording import ROWS
from ringmaster.techniques.runtime.data.manifest import Manifest
from ringmaster.techniques.runtime.data.rows import content_hash, read_rows

USES = {"training": "trained", "held_out": "evaluated"}


def content_of(row: str, text_column: str) -> str:
    """Returns the text that a job reads of a row: `row` itself or, if it has the form FILE:LINE, the text in that line.

    Raises InputError if the file has no such row.
    """
    match = re.fullmatch(r"(.+):(\d+)", row)
    if match is None or not Path(match[1]).is_file():
        return row
    with input_errors():
        value = next((value for number, value in read_rows(match[1]) if number == int(match[2])), None)
    content = value.get(text_column) if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise InputError([f"{row} has no text in column {text_column!r}. To fix: name another by --text-column"])
    return content


def readers_of(content: str, home: LineageHome) -> list[dict[str, Any]]:
    """Returns the models that have read a row of that content, the newest last: model, use and data set."""
    key = content_hash(content)
    manifests: dict[
        str, Manifest | None
    ] = {}  # by the digests of the rows: jobs that read the same rows share an entry
    found = []
    for node in home.snapshot.models:
        for dataset in node.record.datasets:
            if dataset.rows_digest is None or node.record.run_id is None:
                continue
            if dataset.rows_digest not in manifests:
                manifests[dataset.rows_digest] = _manifest(home, node.record.run_id)
            rows = manifests[dataset.rows_digest]
            side = "training" if dataset.context == "training" else "held_out"
            if rows is not None and key in rows.rows[side]:
                use = {"model": node.label, "use": USES[side], "data": dataset.label}
                found.append({**use, "split": dataset.split, "window": dataset.window})
    return found


def _manifest(home: LineageHome, run_id: str) -> Manifest | None:
    try:
        return Manifest.from_json(json.loads(home.ledger.read_text(run_id, ROWS)))
    except LedgerError:  # a run whose artifacts were deleted
        return None
