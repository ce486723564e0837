"""All models of a ledger at once, as plain rows: read quickly from where they are, or kept here and brought up to date.

Importing MLflow takes longer than most questions, so the rows of a sqlite ledger are read from its tables directly,
three selects for any number of models; should a later MLflow arrange them differently, through its client. Rows of a
server are kept in a file, and only what is new or has changed is asked for, by its REST API.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ringmaster.model_lineage.ledger import Ledger
from ringmaster.model_lineage.registry import CHILD, KIND, MODEL_ID
from ringmaster.model_lineage.rest import Server
from ringmaster.model_lineage.tensors.objects import write_once

READY = 2  # of MLflow's LoggedModelStatus
NEW_FOR_MS = 600_000  # rows younger than this are asked for again: their tags may not have been complete
WHOLE_FOR_MS = 86_400_000  # a file older than this is made anew: deleted rows only vanish so
_VERSION = 2  # of the file
_PAGE = 1000
_SOME = 100  # of what is seldom read to its end
_NEWEST_FIRST = "last_updated_timestamp DESC"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A LoggedModel as MLflow has it: the attributes have the names that MLflow gives them.

    metrics: the last value of each. creation_timestamp: milliseconds since the epoch.
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
"""Of each registered model: alias -> version."""


def read_rows(ledger: Ledger, *, cache: Path, is_fresh: bool = False) -> tuple[list[Row], Aliases]:
    """Every model and component of a ledger, and the aliases. cache: a folder for what is kept.

    is_fresh: whether to read everything anew, whatever is kept. A sqlite file that is not there has no rows. Raises
    LedgerError where MLflow cannot be reached.
    """
    if ledger.file is not None:
        if not ledger.file.exists():
            return [], {}
        with suppress(sqlite3.OperationalError):  # other tables than we know: MLflow's client has an answer
            return _read_file(ledger.file, ledger.experiment)
    return _read_client(ledger, cache / "rows.json", is_fresh=is_fresh)


def _read_file(file: Path, experiment: str) -> tuple[list[Row], Aliases]:
    with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True, timeout=30.0)) as connection:
        connection.execute("BEGIN")  # one state of it, whoever writes meanwhile
        of_experiment = "experiment_id = (SELECT experiment_id FROM experiments WHERE name = ?)"
        tags = _by_model(
            connection.execute(
                f"SELECT model_id, tag_key, tag_value FROM logged_model_tags WHERE {of_experiment} "
                "AND tag_key != 'mlflow.note.content' AND tag_key NOT LIKE ?",
                (experiment, f"{CHILD}%"),
            )
        )
        params = _by_model(
            connection.execute(
                f"SELECT model_id, param_key, param_value FROM logged_model_params WHERE {of_experiment}", (experiment,)
            )
        )
        metrics = _by_model(
            connection.execute(
                f"SELECT model_id, metric_name, metric_value FROM logged_model_metrics WHERE {of_experiment} "
                "ORDER BY metric_step, metric_timestamp_ms",
                (experiment,),
            )
        )
        rows = [
            Row(
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
                f"FROM logged_models WHERE {of_experiment} AND lifecycle_stage = 'active' "
                "ORDER BY creation_timestamp_ms, model_id",
                (experiment,),
            )
            if KIND in tags.get(id, {})
        ]
        found = connection.execute("SELECT name, alias, version FROM registered_model_aliases")
        return rows, _by_model(found)


def _by_model(cursor: sqlite3.Cursor) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for model, key, value in cursor:
        found.setdefault(model, {})[key] = value
    return found


def _read_client(ledger: Ledger, file: Path, *, is_fresh: bool) -> tuple[list[Row], Aliases]:
    kept = {} if is_fresh else _kept(file, ledger)
    now_ms = time.time_ns() // 1_000_000
    whole_ms = kept.get("whole_ms", 0)
    rows = {entry["model_id"]: Row(**entry) for entry in kept.get("rows", ())}
    if now_ms - whole_ms > WHOLE_FOR_MS:
        rows, whole_ms = {}, now_ms
    since = _Since(
        created_ms=max((row.creation_timestamp for row in rows.values()), default=0) - NEW_FOR_MS,
        changed_ms=kept.get("changed_ms", 0) - NEW_FOR_MS,
        known=frozenset(rows),
    )
    news = _news(ledger, since)
    rows |= {row.model_id: row for row in news.rows}
    ordered = sorted(rows.values(), key=lambda row: (row.creation_timestamp, row.model_id))
    said = {
        "version": _VERSION,
        "ledger": [ledger.tracking_uri, ledger.experiment],
        "whole_ms": whole_ms,
        "changed_ms": news.changed_ms,
        "rows": [asdict(row) for row in ordered],
    }
    write_once(file, json.dumps(said).encode())
    return ordered, news.aliases


@dataclass(frozen=True, kw_only=True)
class _Since:
    """Rows that were made at `created_ms` or later are asked for, and of the known ones those that have changed since.

    MLflow does not note when a LoggedModel's tags change. All that changes them makes a version of the model, or writes
    to the description of one; and when that was, versions tell.
    """

    created_ms: int
    changed_ms: int
    known: Collection[str]

    @property
    def new(self) -> str:
        """The condition for what is new."""
        return f"creation_timestamp >= {max(self.created_ms, 0)}"

    def changed(self, versions: Iterator[_Changed]) -> tuple[list[str], int]:
        """Conditions for what has changed, and when the newest of `versions` did, which come newest first."""
        newest = next(versions, ("", 0))
        ids: dict[str, None] = {}
        for id, changed_ms in chain([newest], versions if self.known else ()):
            if changed_ms < self.changed_ms:
                break
            if id in self.known:
                ids[id] = None
        listed = [f"'{id}'" for id in ids]
        conditions = [f"model_id IN ({', '.join(listed[i : i + _SOME])})" for i in range(0, len(listed), _SOME)]
        return conditions, newest[1]


_Changed = tuple[str, int]
"""The id of a version's model, and when the version changed last."""


@dataclass(frozen=True, kw_only=True)
class _News:
    """What is new, all aliases, and when the version that was changed last was changed."""

    rows: list[Row]
    aliases: Aliases
    changed_ms: int


def _news(ledger: Ledger, since: _Since) -> _News:
    """What is new: by a server's REST API, else by MLflow's client."""
    try:
        return _ask_server(Server(ledger.tracking_uri), ledger.experiment, since)
    except (OSError, ValueError, KeyError):  # whatever it is, MLflow's client tries again, and knows how to tell it
        changed, changed_ms = since.changed(_versions(ledger))
        rows = [row for condition in (since.new, *changed) for row in _rows_where(ledger, condition)]
        return _News(rows=rows, aliases=_aliases(ledger), changed_ms=changed_ms)


def _ask_server(server: Server, experiment: str, since: _Since) -> _News:
    experiment_id = server.get("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
    changed, changed_ms = since.changed(_versions_of_server(server))
    body = {
        "experiment_ids": [experiment_id],
        "order_by": [{"field_name": "creation_timestamp", "ascending": True}],
        "max_results": _PAGE,
    }
    rows = [
        _row_of_json(entry)
        for condition in (since.new, *changed)
        for entry in server.pages("logged-models/search", {**body, "filter": condition}, key="models")
    ]
    ours = [row for row in rows if KIND in row.tags]
    return _News(rows=ours, aliases=_aliases_of_server(server), changed_ms=changed_ms)


def _versions_of_server(server: Server) -> Iterator[_Changed]:
    token = ""
    while True:
        page = server.get("model-versions/search", max_results=_SOME, order_by=_NEWEST_FIRST, page_token=token)
        for version in page.get("model_versions", ()):
            tags = {tag["key"]: tag.get("value", "") for tag in version.get("tags", ())}
            yield tags.get(MODEL_ID, ""), int(version["last_updated_timestamp"])
        token = page.get("next_page_token", "")
        if not token:
            return


def _aliases_of_server(server: Server) -> Aliases:
    aliases: dict[str, dict[str, int]] = {}
    token = ""
    while True:
        page = server.get("registered-models/search", max_results=_PAGE, page_token=token)
        for model in page.get("registered_models", ()):
            if named := model.get("aliases"):
                aliases[model["name"]] = {entry["alias"]: int(entry["version"]) for entry in named}
        token = page.get("next_page_token", "")
        if not token:
            return aliases


def _row_of_json(entry: Mapping[str, Any]) -> Row:
    info, data = entry["info"], entry.get("data", {})
    metrics = sorted(data.get("metrics", ()), key=lambda metric: (metric.get("step", 0), metric["timestamp"]))
    return Row(
        model_id=info["model_id"],
        experiment_id=str(info["experiment_id"]),
        name=info["name"],
        artifact_location=info["artifact_uri"],
        creation_timestamp=int(info["creation_timestamp_ms"]),
        source_run_id=info.get("source_run_id"),
        is_ready=info["status"] == "LOGGED_MODEL_READY",
        tags=_told({tag["key"]: tag.get("value", "") for tag in info.get("tags", ())}),
        params={param["key"]: param.get("value", "") for param in data.get("params", ())},
        metrics={metric["key"]: metric["value"] for metric in metrics},
    )


def _told(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags that rows have: no pages, and no children, which their parents' ids tell."""
    return {k: v for k, v in tags.items() if k != "mlflow.note.content" and not k.startswith(CHILD)}


def _kept(file: Path, ledger: Ledger) -> dict[str, Any]:
    """What a file keeps of this ledger; nothing where it is of another, or is none."""
    try:
        said: dict[str, Any] = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    is_ours = said.get("version") == _VERSION and said.get("ledger") == [ledger.tracking_uri, ledger.experiment]
    return said if is_ours else {}


def _rows_where(ledger: Ledger, condition: str) -> Iterator[Row]:
    experiment_id = ledger.experiment_id(ledger.experiment, create=False)
    if experiment_id is None:
        return
    order = [{"field_name": "creation_timestamp", "ascending": True}]
    token = None
    while True:
        page = ledger.client.search_logged_models(
            [experiment_id],
            f"tags.`{KIND}` != '' AND {condition}",
            max_results=_PAGE,
            order_by=order,
            page_token=token,
        )
        yield from map(_row, page)
        token = page.token
        if not token:
            return


def _versions(ledger: Ledger) -> Iterator[_Changed]:
    token = None
    while True:
        page = ledger.client.search_model_versions(max_results=_SOME, order_by=[_NEWEST_FIRST], page_token=token)
        yield from ((version.tags.get(MODEL_ID, ""), version.last_updated_timestamp) for version in page)
        token = page.token
        if not token:
            return


def _row(model: Any) -> Row:
    metrics = sorted(model.metrics or [], key=lambda metric: (metric.step, metric.timestamp))
    return Row(
        model_id=model.model_id,
        experiment_id=str(model.experiment_id),
        name=model.name,
        artifact_location=model.artifact_location,
        creation_timestamp=model.creation_timestamp,
        source_run_id=model.source_run_id,
        is_ready=model.status == "READY",
        tags=_told(model.tags),
        params=dict(model.params or {}),
        metrics={metric.key: metric.value for metric in metrics},
    )


def _aliases(ledger: Ledger) -> Aliases:
    found: dict[str, dict[str, int]] = {}
    token = None
    while True:
        page = ledger.client.search_registered_models(max_results=_PAGE, page_token=token)
        found |= {model.name: {a: int(v) for a, v in model.aliases.items()} for model in page if model.aliases}
        token = page.token
        if not token:
            return found
