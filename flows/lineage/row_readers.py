"""The search for the models that have read a row of data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ringmaster.errors import InputError, LedgerError, input_errors
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage import DatasetInput
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.tasks.recording.rows import ROWS
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.data.row_files import content_hash, read_rows

USES = {"training": "trained", "held_out": "evaluated"}


@dataclass(frozen=True, kw_only=True)
class TracedRow:
    """A row to search for: a text, the mapping in a line of a file, or the hash of what was read of it.

    place: what it is called in messages. hash: of its content, where only that is known.
    """

    value: Any
    place: str
    hash: str | None = None

    @classmethod
    def of(cls, row: str) -> Self:
        """Returns the row of that text, of a content hash, or of the form FILE:LINE, which is the one in that line.

        Raises InputError if the file has no such row.
        """
        if re.fullmatch(r"[0-9a-f]{16}", row):
            return cls(value=row, place=row, hash=row)
        match = re.fullmatch(r"(.+):(\d+)", row)
        if match is None or not Path(match[1]).is_file():
            return cls(value=row, place=row)
        with input_errors():
            for number, value in read_rows(match[1]):
                if number == int(match[2]):
                    return cls(value=value, place=row)
        raise InputError([f"{row} holds no row. To fix: check the number of the line"])

    def hash_of(self, columns: Sequence[str], *, text_column: str) -> str | None:
        """Returns the hash of what a job reads of the row: `columns` or, without any, the text; None if neither."""
        if self.hash is not None:
            return self.hash
        if not isinstance(self.value, Mapping):
            return None if columns else content_hash(self.value)
        if columns:
            return content_hash({name: self.value.get(name) for name in columns})
        text = self.value.get(text_column)
        return content_hash(text) if isinstance(text, str) else None


@dataclass(frozen=True, kw_only=True)
class ReadRows:
    """The rows that a job has read. columns: those that were read of each row; () where it was the text alone."""

    manifest: RowManifest
    columns: tuple[str, ...]


def reads_of(
    row: TracedRow, home: LineageHome, *, text_column: str = "text"
) -> list[tuple[LineageNode, DatasetInput, str]]:
    """Returns the models that have read a row, the newest last, each with the data set and the hash of the row there.

    Raises InputError if the row has no text, and nothing has read other columns of it.
    """
    known: dict[str, ReadRows] = {}  # by the digests of the rows: jobs that read the same rows share an entry
    reads = [(node, each) for node in home.snapshot.models for each in node.record.datasets if each.rows_digest]
    for node, dataset in reads:  # some models have the rows of their parents
        run, digest = node.record.run_id, str(dataset.rows_digest)
        if run is not None and digest not in known and (rows := rows_read_by(home, run)) is not None:
            known[digest] = rows
    result = []
    for node, dataset in reads:
        if (of := known.get(str(dataset.rows_digest))) is None:
            continue
        hash = row.hash_of(of.columns, text_column=text_column)
        if hash is not None and hash in of.manifest.rows[_side(dataset)]:
            result.append((node, dataset, hash))
    if not result and row.hash_of((), text_column=text_column) is None:
        raise InputError([f"{row.place} has no text in column {text_column!r}. To fix: name another by --text-column"])
    return result


def readers_of(row: TracedRow, home: LineageHome, *, text_column: str = "text") -> list[dict[str, Any]]:
    """Returns what `reads_of` returns, as text: model, use and data set."""
    return [
        {
            "model": node.label,
            "use": USES[_side(dataset)],
            "data": dataset.label,
            "split": dataset.split,
            "window": dataset.window,
        }
        for node, dataset, _ in reads_of(row, home, text_column=text_column)
    ]


def _side(dataset: DatasetInput) -> str:
    return "training" if dataset.context == "training" else "held_out"


def rows_read_by(home: LineageHome, run_id: str) -> ReadRows | None:
    """Returns the rows that the job of a run has read; None where its artifacts were deleted."""
    try:
        value = json.loads(home.ledger.read_text(run_id, ROWS))
    except LedgerError:  # a run whose artifacts were deleted
        return None
    return ReadRows(manifest=RowManifest.from_json(value), columns=tuple(value.get("columns", ())))
