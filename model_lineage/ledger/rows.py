"""Reads all models of a ledger at once as plain rows, from sqlite, from a server, or from a local cache.

Importing MLflow takes longer than most queries. The rows of a sqlite ledger are therefore read from its tables
directly, with a constant number of SELECTs for any number of models. If a later MLflow changes the tables, its client
is used. Rows of a server are cached in a file, and only new or changed ones are requested, through MLflow's client.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ringmaster.errors import LedgerError
from ringmaster.files import write_atomically
from ringmaster.model_lineage.ledger.connection import database_fault, paged
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.ledger.registry import CHILD, KIND, MODEL_ID

READY = 2  # a value of MLflow's LoggedModelStatus
NEW_FOR_MS = 600_000  # younger rows are requested again, as their tags may have been incomplete
WHOLE_FOR_MS = 86_400_000  # an older cache is rebuilt, the only way in which deleted rows vanish from it
_VERSION = 2  # of the cache file's format
_PAGE = 1000
_SOME = 100  # page size of searches that are seldom read to their end
_NEWEST_FIRST = "last_updated_timestamp DESC"


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A LoggedModel; the attributes have MLflow's names.

    metrics: the last value of each metric. creation_timestamp: milliseconds since the epoch.
    """

    model_id: str
    experiment_id: str
    name: str
    artifact_location: str
    creation_timestamp: int
    source_run_id: str | None
    is_ready: bool
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


Aliases = Mapping[str, Mapping[str, int]]
"""For each registered model: alias -> version."""


def read_rows(ledger: Ledger, *, cache: Path, is_fresh: bool = False) -> tuple[list[ModelRow], Aliases]:
    """Returns every model and component of a ledger, and the aliases.

    cache: the folder of the cache. is_fresh: whether to read everything anew, ignoring the cache. A sqlite file that
    does not exist has no rows. Raises LedgerError if MLflow cannot be reached.
    """
    if ledger.file is not None:
        if not ledger.file.exists():
            return [], {}
        try:
            return _read_file(ledger.file, ledger.experiment)
        except sqlite3.DatabaseError as error:
            if fault := database_fault(ledger.file):
                raise LedgerError(fault) from error
            # Otherwise the tables are unknown, and MLflow's client can read them.
    return _read_client(ledger, cache / "rows.json", is_fresh=is_fresh)


def _read_file(file: Path, experiment: str) -> tuple[list[ModelRow], Aliases]:
    with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True, timeout=30.0)) as connection:
        connection.execute("BEGIN")  # a consistent state, despite concurrent writers
        of_ledger = (
            "experiment_id IN (SELECT experiment_id FROM experiments WHERE lifecycle_stage = 'active' "
            "AND (name = :experiment OR substr(name, 1, length(:experiment) + 1) = :experiment || '/'))"
        )
        fields = {"experiment": experiment, "child": f"{CHILD}%"}
        tags = _by_model(
            connection.execute(
                f"SELECT model_id, tag_key, tag_value FROM logged_model_tags WHERE {of_ledger} "
                "AND tag_key != 'mlflow.note.content' AND tag_key NOT LIKE :child",
                fields,
            )
        )
        params = _by_model(
            connection.execute(
                f"SELECT model_id, param_key, param_value FROM logged_model_params WHERE {of_ledger}", fields
            )
        )
        metrics = _by_model(
            connection.execute(
                f"SELECT model_id, metric_name, metric_value FROM logged_model_metrics WHERE {of_ledger} "
                "ORDER BY metric_step, metric_timestamp_ms",
                fields,
            )
        )
        rows = [
            ModelRow(
                model_id=id,
                experiment_id=str(experiment_id),
                name=name,
                artifact_location=location,
                creation_timestamp=created_ms,
                source_run_id=run_id,
                is_ready=status == READY,
                tags=tags[id],
                params=params.get(id, {}),
                metrics=metrics.get(id, {}),
            )
            for id, experiment_id, name, location, created_ms, run_id, status in connection.execute(
                "SELECT model_id, experiment_id, name, artifact_location, creation_timestamp_ms, source_run_id, status "
                f"FROM logged_models WHERE {of_ledger} AND lifecycle_stage = 'active' "
                "ORDER BY creation_timestamp_ms, model_id",
                fields,
            )
            if KIND in tags.get(id, {})
        ]
        result = connection.execute("SELECT name, alias, version FROM registered_model_aliases")
        return rows, _by_model(result)


def _by_model(cursor: sqlite3.Cursor) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for model, key, value in cursor:
        result.setdefault(model, {})[key] = value
    return result


def _read_client(ledger: Ledger, file: Path, *, is_fresh: bool) -> tuple[list[ModelRow], Aliases]:
    kept = {} if is_fresh else _kept(file, ledger)
    now_ms = time.time_ns() // 1_000_000
    whole_ms = kept.get("whole_ms", 0)
    rows = {entry["model_id"]: ModelRow(**entry) for entry in kept.get("rows", ())}
    if now_ms - whole_ms > WHOLE_FOR_MS:
        rows, whole_ms = {}, now_ms
    created_ms = max((row.creation_timestamp for row in rows.values()), default=0) - NEW_FOR_MS
    ids, changed_ms = _changed(ledger, rows, since_ms=kept.get("changed_ms", 0) - NEW_FOR_MS)
    conditions = [f"model_id IN ({', '.join(ids[i : i + _SOME])})" for i in range(0, len(ids), _SOME)]
    for condition in (f"creation_timestamp >= {max(created_ms, 0)}", *conditions):
        rows |= {row.model_id: row for row in _rows_where(ledger, condition)}
    ordered = sorted(rows.values(), key=lambda row: (row.creation_timestamp, row.model_id))
    fields = {
        "version": _VERSION,
        "ledger": [ledger.tracking_uri, ledger.experiment],
        "whole_ms": whole_ms,
        "changed_ms": changed_ms,
        "rows": [asdict(row) for row in ordered],
    }
    write_atomically(file, json.dumps(fields).encode())
    models = paged(ledger.client.search_registered_models)
    return ordered, {model.name: {a: int(v) for a, v in model.aliases.items()} for model in models if model.aliases}


def _changed(ledger: Ledger, known: Collection[str], *, since_ms: int) -> tuple[list[str], int]:
    """Returns the quoted ids of known models that have changed since a time, and the time of the newest change.

    MLflow does not note when a LoggedModel's tags change. But every operation that changes them also creates a version
    of the model or updates a version's description, so the timestamps of the versions show the change.
    """
    ids: dict[str, None] = {}
    newest_ms = 0
    for version in paged(ledger.client.search_model_versions, max_results=_SOME, order_by=[_NEWEST_FIRST]):
        newest_ms = max(newest_ms, version.last_updated_timestamp)
        if not known or version.last_updated_timestamp < since_ms:
            break
        if (id := version.tags.get(MODEL_ID, "")) in known:
            ids[f"'{id}'"] = None
    return list(ids), newest_ms


def _shown_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Returns the tags without page texts and children, which the children's parent ids give."""
    return {k: v for k, v in tags.items() if k != "mlflow.note.content" and not k.startswith(CHILD)}


def _kept(file: Path, ledger: Ledger) -> dict[str, Any]:
    """Returns the content of the cache file, empty if it belongs to another ledger or is invalid."""
    try:
        fields: dict[str, Any] = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    is_ours = fields.get("version") == _VERSION and fields.get("ledger") == [ledger.tracking_uri, ledger.experiment]
    return fields if is_ours else {}


def _rows_where(ledger: Ledger, condition: str) -> Iterator[ModelRow]:
    experiment_ids = ledger.experiment_ids()
    if not experiment_ids:
        return
    order, where = [{"field_name": "creation_timestamp", "ascending": True}], f"tags.`{KIND}` != '' AND {condition}"
    yield from map(_row, paged(ledger.client.search_logged_models, experiment_ids, where, order_by=order))


def _row(model: Any) -> ModelRow:
    metrics = sorted(model.metrics or [], key=lambda metric: (metric.step, metric.timestamp))
    return ModelRow(
        model_id=model.model_id,
        experiment_id=str(model.experiment_id),
        name=model.name,
        artifact_location=model.artifact_location,
        creation_timestamp=model.creation_timestamp,
        source_run_id=model.source_run_id,
        is_ready=model.status == "READY",
        tags=_shown_tags(model.tags),
        params=dict(model.params or {}),
        metrics={metric.key: metric.value for metric in metrics},
    )
