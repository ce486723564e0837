"""Search for the models that have read a row, by the content hashes that jobs store for named data sets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ringmaster.errors import InputError, LedgerError, input_errors
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.tasks.datasets.recording import ROWS
from ringmaster.techniques.data.manifest import RowManifest
from ringmaster.techniques.data.row_files import content_hash, read_rows

USES = {"training": "trained", "held_out": "evaluated"}


@dataclass(frozen=True, kw_only=True)
class TracedRow:
    """A row to search for: a text, or the mapping in a line of a file. place: what it is called in messages."""

    value: Any
    place: str

    @classmethod
    def of(cls, row: str) -> Self:
        """Returns the row of that text or, if it has the form FILE:LINE, the one in that line.

        Raises InputError if the file has no such row.
        """
        match = re.fullmatch(r"(.+):(\d+)", row)
        if match is None or not Path(match[1]).is_file():
            return cls(value=row, place=row)
        with input_errors():
            for number, value in read_rows(match[1]):
                if number == int(match[2]):
                    return cls(value=value, place=row)
        raise InputError([f"{row} holds no row. To fix: check the number of the line"])

    def content(self, columns: Sequence[str], *, text_column: str) -> Any:
        """Returns what a job reads of the row: the values of `columns` or, without any, the text; None if neither."""
        if not isinstance(self.value, Mapping):
            return None if columns else self.value
        if columns:
            return {name: self.value.get(name) for name in columns}
        text = self.value.get(text_column)
        return text if isinstance(text, str) else None


@dataclass(frozen=True, kw_only=True)
class _ReadRows:
    """The rows that a job has read. columns: those that were read of each row; () where it was the text alone."""

    manifest: RowManifest
    columns: tuple[str, ...]


def readers_of(row: TracedRow, home: LineageHome, *, text_column: str = "text") -> list[dict[str, Any]]:
    """Returns the models that have read a row of that content, the newest last: model, use and data set.

    Raises InputError if the row has no text, and nothing has read other columns of it.
    """
    known: dict[str, _ReadRows | None] = {}  # by the digests of the rows: jobs that read the same rows share an entry
    found = []
    for node in home.snapshot.models:
        for dataset in node.record.datasets:
            if dataset.rows_digest is None or node.record.run_id is None:
                continue
            if dataset.rows_digest not in known:
                known[dataset.rows_digest] = _rows(home, node.record.run_id)
            rows = known[dataset.rows_digest]
            content = None if rows is None else row.content(rows.columns, text_column=text_column)
            side = "training" if dataset.context == "training" else "held_out"
            if rows is not None and content is not None and content_hash(content) in rows.manifest.rows[side]:
                use = {"model": node.label, "use": USES[side], "data": dataset.label}
                found.append({**use, "split": dataset.split, "window": dataset.window})
    if not found and row.content((), text_column=text_column) is None:
        raise InputError([f"{row.place} has no text in column {text_column!r}. To fix: name another by --text-column"])
    return found


def _rows(home: LineageHome, run_id: str) -> _ReadRows | None:
    try:
        said = json.loads(home.ledger.read_text(run_id, ROWS))
    except LedgerError:  # a run whose artifacts were deleted
        return None
    return _ReadRows(manifest=RowManifest.from_json(said), columns=tuple(said.get("columns", ())))
