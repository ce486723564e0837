"""Batches as flows are given them: a value in Python, JSON, a text, or a file."""

import json
from pathlib import Path
from typing import Any

from ringmaster.codec import digest
from ringmaster.files import write_atomically
from ringmaster.flows import settings
from ringmaster.flows.settings import resolve_path
from ringmaster.tasks.batch import Batch, load_batch, parse_batch

MAX_PARAMETER_BYTES = 250_000  # of a batch as a parameter of a flow run, of which Prefect's server takes 512 KiB

BatchInput = Batch | str | dict[str, Any]
"""A batch, a path, a text, a mapping or a Batch's JSON form, which may also be in a file."""


def as_batch(batch: BatchInput) -> Batch:
    """Returns the batch that is given in any of these forms. Raises BatchFileError with every fault."""
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, dict):
        if "text" in batch:
            return Batch.from_json(batch)
        return parse_batch(json.dumps(batch), folder=Path.cwd(), name="batch")
    if "\n" in batch:
        return parse_batch(batch, folder=Path.cwd(), name="batch")
    return _kept_batch(Path(batch)) or load_batch(resolve_path(batch))


def as_parameter(batch: Batch) -> BatchInput:
    """Returns the batch as a parameter of a flow: its JSON form, or the file of a batch too long for Prefect."""
    content = batch.to_json()
    return content if len(json.dumps(content)) <= MAX_PARAMETER_BYTES else str(batch_in_file(batch))


def batch_in_file(batch: Batch) -> Path:
    """Writes a batch, paths resolved, into a file on the storage that all nodes share; returns the file."""
    file = settings.home() / "batches" / batch.name / f"submitted-{digest(batch.to_json())}.json"
    if not file.exists():
        write_atomically(file, json.dumps(batch.to_json()).encode())
    return file


def _kept_batch(file: Path) -> Batch | None:
    """Returns the batch whose JSON form is in a file, None if the file holds something else."""
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return Batch.from_json(data) if isinstance(data, dict) and "text" in data else None
