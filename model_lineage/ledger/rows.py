"""Reads all models of a ledger at once as plain rows, from sqlite, from a server, or from a local cache.

Importing MLflow takes longer than most queries. The rows of a sqlite ledger are therefore read from its tables
directly, with a constant number of SELECTs for any number of models. If a later MLflow changes the tables, its client
is used. Rows of a server are cached in a file, and only new or changed ones are requested through its REST API
(https://mlflow.org/docs/latest/api_reference/rest-api.html). MLflow's own client supports more (cloud tokens,
certificates, retries), and is used where a request fails.
"""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ringmaster.errors import LedgerError
from ringmaster.model_lineage.ledger.connection import database_fault, is_of_ledger, paged
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.ledger.registry import CHILD, KIND, MODEL_ID
from ringmaster.model_lineage.tensors.objects import write_once

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
        said = {"experiment": experiment, "child": f"{CHILD}%"}
        tags = _by_model(
            connection.execute(
                f"SELECT model_id, tag_key, tag_value FROM logged_model_tags WHERE {of_ledger} "
                "AND tag_key != 'mlflow.note.content' AND tag_key NOT LIKE :child",
                said,
            )
        )
        params = _by_model(
            connection.execute(
                f"SELECT model_id, param_key, param_value FROM logged_model_params WHERE {of_ledger}", said
            )
        )
        metrics = _by_model(
            connection.execute(
                f"SELECT model_id, metric_name, metric_value FROM logged_model_metrics WHERE {of_ledger} "
                "ORDER BY metric_step, metric_timestamp_ms",
                said,
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
                said,
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


def _read_client(ledger: Ledger, file: Path, *, is_fresh: bool) -> tuple[list[ModelRow], Aliases]:
    kept = {} if is_fresh else _kept(file, ledger)
    now_ms = time.time_ns() // 1_000_000
    whole_ms = kept.get("whole_ms", 0)
    rows = {entry["model_id"]: ModelRow(**entry) for entry in kept.get("rows", ())}
    if now_ms - whole_ms > WHOLE_FOR_MS:
        rows, whole_ms = {}, now_ms
    since = _RowCursor(
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
class _RowCursor:
    """The state of the cache, from which the search conditions for new and changed rows follow.

    Rows made at `created_ms` or later are requested, and those `known` rows that have changed since `changed_ms`.
    MLflow does not note when a LoggedModel's tags change. But every operation that changes them also creates a version
    of the model or updates a version's description, so the timestamps of the versions show the change.
    """

    created_ms: int
    changed_ms: int
    known: Collection[str]

    @property
    def new(self) -> str:
        """The search condition for new rows."""
        return f"creation_timestamp >= {max(self.created_ms, 0)}"

    def changed(self, versions: Iterator[_Changed]) -> tuple[list[str], int]:
        """Returns the search conditions for changed rows, and the time of the newest change. versions: newest first."""
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
"""The id of a version's model, and when the version was last changed."""


@dataclass(frozen=True, kw_only=True)
class _RowChanges:
    """The new and changed rows, all aliases, and the timestamp of the newest change of a version."""

    rows: list[ModelRow]
    aliases: Aliases
    changed_ms: int


def _news(ledger: Ledger, since: _RowCursor) -> _RowChanges:
    """Fetches new and changed rows through the server's REST API, or else through MLflow's client."""
    try:
        return _ask_server(MlflowServer(ledger.tracking_uri), ledger.experiment, since)
    except (OSError, ValueError, KeyError):  # MLflow's client tries again, and reports the fault properly
        changed, changed_ms = since.changed(_versions(ledger))
        rows = [row for condition in (since.new, *changed) for row in _rows_where(ledger, condition)]
        return _RowChanges(rows=rows, aliases=_aliases(ledger), changed_ms=changed_ms)


def _ask_server(server: MlflowServer, experiment: str, since: _RowCursor) -> _RowChanges:
    named = {"filter": f"name LIKE '{experiment}%'", "max_results": _PAGE}
    experiments = server.pages("experiments/search", named, key="experiments")
    experiment_ids = [found["experiment_id"] for found in experiments if is_of_ledger(found["name"], experiment)]
    if not experiment_ids:
        raise KeyError(experiment)
    changed, changed_ms = since.changed(_versions_of_server(server))
    body = {
        "experiment_ids": experiment_ids,
        "order_by": [{"field_name": "creation_timestamp", "ascending": True}],
        "max_results": _PAGE,
    }
    rows = [
        _row_of_json(entry)
        for condition in (since.new, *changed)
        for entry in server.pages("logged-models/search", {**body, "filter": condition}, key="models")
    ]
    ours = [row for row in rows if KIND in row.tags]
    return _RowChanges(rows=ours, aliases=_aliases_of_server(server), changed_ms=changed_ms)


def _versions_of_server(server: MlflowServer) -> Iterator[_Changed]:
    newest_first = server.listed(
        "model-versions/search", key="model_versions", max_results=_SOME, order_by=_NEWEST_FIRST
    )
    for version in newest_first:
        tags = {tag["key"]: tag.get("value", "") for tag in version.get("tags", ())}
        yield tags.get(MODEL_ID, ""), int(version["last_updated_timestamp"])


def _aliases_of_server(server: MlflowServer) -> Aliases:
    every = server.listed("registered-models/search", key="registered_models", max_results=_PAGE)
    return {
        model["name"]: {entry["alias"]: int(entry["version"]) for entry in model["aliases"]}
        for model in every
        if model.get("aliases")
    }


def _row_of_json(entry: Mapping[str, Any]) -> ModelRow:
    info, data = entry["info"], entry.get("data", {})
    metrics = sorted(data.get("metrics", ()), key=lambda metric: (metric.get("step", 0), metric["timestamp"]))
    return ModelRow(
        model_id=info["model_id"],
        experiment_id=str(info["experiment_id"]),
        name=info["name"],
        artifact_location=info["artifact_uri"],
        creation_timestamp=int(info["creation_timestamp_ms"]),
        source_run_id=info.get("source_run_id"),
        is_ready=info["status"] == "LOGGED_MODEL_READY",
        tags=_shown_tags({tag["key"]: tag.get("value", "") for tag in info.get("tags", ())}),
        params={param["key"]: param.get("value", "") for param in data.get("params", ())},
        metrics={metric["key"]: metric["value"] for metric in metrics},
    )


def _shown_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Returns the tags without page texts and children, which the children's parent ids give."""
    return {k: v for k, v in tags.items() if k != "mlflow.note.content" and not k.startswith(CHILD)}


def _kept(file: Path, ledger: Ledger) -> dict[str, Any]:
    """Returns the content of the cache file, empty if it belongs to another ledger or is invalid."""
    try:
        said: dict[str, Any] = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    is_ours = said.get("version") == _VERSION and said.get("ledger") == [ledger.tracking_uri, ledger.experiment]
    return said if is_ours else {}


def _rows_where(ledger: Ledger, condition: str) -> Iterator[ModelRow]:
    experiment_ids = ledger.experiment_ids()
    if not experiment_ids:
        return
    order, where = [{"field_name": "creation_timestamp", "ascending": True}], f"tags.`{KIND}` != '' AND {condition}"
    yield from map(_row, paged(ledger.client.search_logged_models, experiment_ids, where, order_by=order))


def _versions(ledger: Ledger) -> Iterator[_Changed]:
    for version in paged(ledger.client.search_model_versions, max_results=_SOME, order_by=[_NEWEST_FIRST]):
        yield version.tags.get(MODEL_ID, ""), version.last_updated_timestamp


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


def _aliases(ledger: Ledger) -> Aliases:
    every = paged(ledger.client.search_registered_models)
    return {model.name: {a: int(v) for a, v in model.aliases.items()} for model in every if model.aliases}


REQUEST_TIMEOUT_S = 30.0


class MlflowServer:
    """An MLflow server, with the user and password or the token that the environment has for it.

    All methods raise OSError or ValueError if the server does not answer as expected.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")

    def pages(self, path: str, body: Mapping[str, Any], *, key: str) -> Iterator[Any]:
        """Yields the entries under `key` on all pages of a search that is sent as JSON."""
        yield from self._pages(lambda token: self._ask(path, body={**body, **token}), key)

    def listed(self, path: str, *, key: str, **query: Any) -> Iterator[Any]:
        """Yields the entries under `key` on all pages of a search whose query is part of the URL."""
        yield from self._pages(lambda token: self._ask(f"{path}?{urlencode({**query, **token})}"), key)

    def _pages(self, ask: Callable[[Mapping[str, str]], Any], key: str) -> Iterator[Any]:
        token: Mapping[str, str] = {}
        while True:
            page = ask(token)
            yield from page.get(key, ())
            if not page.get("next_page_token"):
                return
            token = {"page_token": page["next_page_token"]}

    def _ask(self, path: str, *, body: Mapping[str, Any] | None = None) -> Any:
        parts = urlsplit(self._uri)
        # urllib does not find an IPv6 address among the exceptions from proxies.
        if parts.scheme not in ("http", "https") or parts.username or ":" in (parts.hostname or ""):
            raise ValueError(f"{parts.scheme} is asked by MLflow's client")
        request = urllib.request.Request(
            f"{self._uri}/api/2.0/mlflow/{path}", data=None if body is None else json.dumps(body).encode()
        )
        request.add_header("Content-Type", "application/json")
        if (credentials := _authorization()) is not None:
            request.add_header("Authorization", credentials)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.loads(answer.read())


def _authorization() -> str | None:
    """Returns the Authorization header that MLflow's client would derive from the environment, or None."""
    if username := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{username}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return f"Basic {base64.b64encode(pair.encode()).decode()}"
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else None
