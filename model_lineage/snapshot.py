"""A snapshot of the lineage in memory: models by name, ancestry, differences, garbage collection, consistency.

All models of a ledger are read at once as plain rows. Importing MLflow takes longer than most queries, so those of a
sqlite ledger come from its tables, with a constant number of SELECTs for any number of models. If a later MLflow
changes the tables, its client is used. Rows of a server are cached in a file, and only new or changed ones are
requested.
"""

from __future__ import annotations

import difflib
import json
import re
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ringmaster.compat import mlflow as compat
from ringmaster.errors import LedgerError, UnknownModel
from ringmaster.files import write_atomically
from ringmaster.model_lineage.graph import Graph
from ringmaster.model_lineage.ledger import families
from ringmaster.model_lineage.ledger.connection import database_fault, paged
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import (
    CHAMPION,
    COMPONENT,
    DatasetInput,
    ModelRecord,
    metric_text,
    states_of,
)
from ringmaster.model_lineage.sqlite_files import read_only
from ringmaster.model_lineage.tensors import TensorStore

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
Outcomes = Mapping[tuple[str, int], str]
"""For each version, by name and number, the outcome of the last decision about it."""


def read_rows(ledger: Ledger, *, cache: Path, is_fresh: bool = False) -> tuple[list[ModelRow], Aliases, Outcomes]:
    """Returns every model and component of a ledger, the aliases, and the outcomes of decisions.

    cache: the folder of the cache. is_fresh: whether to read everything again, ignoring the cache. A sqlite file that
    does not exist has no rows. Raises LedgerError if MLflow cannot be reached.
    """
    if ledger.file is not None:
        if not ledger.file.exists():
            return [], {}, {}
        try:
            return _read_file(ledger.file, ledger.experiment)
        except sqlite3.DatabaseError as error:
            if fault := database_fault(ledger.file, writes=False):
                raise LedgerError(fault) from error
            # Otherwise the tables are unknown, and MLflow's client can read them.
    return _read_client(ledger, cache / "rows.json", is_fresh=is_fresh)


def _read_file(file: Path, experiment: str) -> tuple[list[ModelRow], Aliases, Outcomes]:
    with closing(read_only(file)) as connection:
        connection.execute("BEGIN")  # a consistent state, despite concurrent writers
        tags = _by_model(compat.model_tags(connection, experiment=experiment, but=f"{families.CHILD}%"))
        params = _by_model(compat.model_params(connection, experiment=experiment))
        metrics = _by_model(compat.model_metrics(connection, experiment=experiment))
        rows = [
            ModelRow(**model, tags=tags[id], params=params.get(id, {}), metrics=metrics.get(id, {}))
            for model in compat.models(connection, experiment=experiment)
            if families.KIND in tags.get(id := model["model_id"], {})
        ]
        aliases = _by_model(compat.aliases(connection))
        decided = compat.version_tags(connection, key=families.DECISION)
        decisions = {(name, version): families.outcome_in({families.DECISION: tag}) for name, version, tag in decided}
        return rows, aliases, {version: outcome for version, outcome in decisions.items() if outcome is not None}


def _by_model(cursor: sqlite3.Cursor) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for model, key, value in cursor:
        result.setdefault(model, {})[key] = value
    return result


def _read_client(ledger: Ledger, file: Path, *, is_fresh: bool) -> tuple[list[ModelRow], Aliases, Outcomes]:
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
    with suppress(OSError):  # of a home that this user may only read, or whose disk is full
        write_atomically(file, json.dumps(fields).encode())
    models = paged(ledger.client.search_registered_models)
    aliases = {model.name: {a: int(v) for a, v in model.aliases.items()} for model in models if model.aliases}
    return ordered, aliases, ledger.outcomes()


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
        if (id := version.tags.get(families.MODEL_ID, "")) in known:
            ids[f"'{id}'"] = None
    return list(ids), newest_ms


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
    order, where = (
        [{"field_name": "creation_timestamp", "ascending": True}],
        f"tags.`{families.KIND}` != '' AND {condition}",
    )
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
        # Without page texts, and children, which the children's parent ids give.
        tags={k: v for k, v in model.tags.items() if k != families.NOTE and not k.startswith(families.CHILD)},
        params=dict(model.params or {}),
        metrics={metric.key: metric.value for metric in metrics},
    )


BEHAVIOUR = "behaviour/"  # prefix of the metrics of behavioural tests
_SHORTEST_ID = 6  # the shortest prefix of a model's id or a data set's digest that is accepted


@dataclass(frozen=True, kw_only=True)
class LineageNode:
    """A model or a component, with all of its recorded metadata.

    aliases: the aliases of this version.
    others: the same model as versions of its other names, for example as the best trial of a sweep.
    metrics: the last value of each held-out metric.
    culprit_by: the test by which a fault was found to have begun with this model; empty if none was.
    location: the URI of the model's files.
    metric: the main metric with the number of its rows, as text.
    outcome: of the last decision about this version. is_undone: whether others were made in its place by an undo.
    """

    record: ModelRecord
    aliases: tuple[str, ...] = ()
    metric: str = ""
    outcome: str | None = None
    is_undone: bool = False
    others: tuple[LineageNode, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    created_ms: int = 0
    is_ready: bool = True
    location: str = ""
    culprit_by: str = ""

    @property
    def id(self) -> str:
        """The model's permanent id."""
        return self.record.model_id

    @property
    def label(self) -> str:
        """The display name: NAME/VERSION, or NAME for a model without a version."""
        version = self.record.version
        return self.record.registered_name + ("" if version is None else f"/{version}")

    @property
    def states(self) -> tuple[str, ...]:
        """The states of the model, under any of its names."""
        outcomes = [version.outcome for version in self.versions if version.outcome is not None]
        return states_of(
            aliases=[alias for version in self.versions for alias in version.aliases],
            outcome=outcomes[0] if outcomes else None,
            is_undone=self.is_undone,
            is_ready=self.is_ready,
        )

    @property
    def repeating_job(self) -> str:
        """The name of a job that trains the model again, in its place."""
        return self.label.replace("/", "-v")

    @property
    def versions(self) -> tuple[LineageNode, ...]:
        """The model under each of its names, the most recent name first."""
        return (self, *self.others)

    def carrying(self, alias: str) -> LineageNode | None:
        """Returns the version of the model that has an alias, under any of its names, or None."""
        return next((version for version in self.versions if alias in version.aliases), None)


class Snapshot:
    """The nodes of a lineage. A deleted model that is a parent of another is in the graph only."""

    def __init__(self, nodes: Iterable[LineageNode]) -> None:
        self.nodes = {node.id: node for node in nodes}

    @classmethod
    def of(cls, ledger: Ledger, *, cache: Path, is_fresh: bool = False) -> Snapshot:
        """Reads the current content of the ledger. cache: the folder for rows of a server. Raises LedgerError."""
        rows, aliases, outcomes = read_rows(ledger, cache=cache, is_fresh=is_fresh)
        return cls(node_of(row, aliases, outcomes) for row in rows)

    @cached_property
    def models(self) -> tuple[LineageNode, ...]:
        """The models, oldest first."""
        return tuple(node for node in self.nodes.values() if node.record.kind != COMPONENT)

    @cached_property
    def graph(self) -> Graph:
        """The graph of the models. Raises ValueError if damaged records make a model its own ancestor."""
        return Graph((node.id, node.record.parents) for node in self.models)

    def label(self, id: str) -> str:
        """Returns the display name of the node with that id."""
        return self.nodes[id].label if id in self.nodes else f"{id} (deleted)"

    def find(self, name: str) -> LineageNode:
        """Returns the node for NAME@ALIAS, NAME/VERSION, NAME, a model id or a prefix of one, with or without models:/.

        A name alone means its champion, or its newest version if it has no champion. NAME may be that of the
        job alone, JOB for BATCH.JOB, where one batch only has such a job. Raises UnknownModel.
        """
        text = name.removeprefix("models:/")
        if text in self.nodes:
            return self.nodes[text]
        if text.startswith("m-") and len(text) >= _SHORTEST_ID:
            begun = [node for id, node in self.nodes.items() if id.startswith(text)]
            if len(begun) == 1:
                return begun[0]
            if begun and text not in self._by_name:
                raise UnknownModel(_ambiguous(text, begun))
        base, alias, version = _parts(text)
        versions = self._by_name.get(base) or self._of_job(base)
        if alias is not None:
            versions = [node for node in versions if alias in node.aliases]
        elif version is not None:
            versions = [node for node in versions if node.record.version == version]
        if not versions:
            raise UnknownModel(self._unknown(name, base))
        champions = [node for node in versions if CHAMPION in node.aliases]
        return max(champions or versions, key=lambda node: (node.record.version or 0, node.created_ms))

    def _of_job(self, job: str) -> list[LineageNode]:
        """Returns the versions of the only model that is registered as BATCH.JOB; none where there are several."""
        names = [name for name in self._by_name if name.endswith(f".{job}")]
        return self._by_name[names[0]] if len(names) == 1 else []

    def versions(self, name: str) -> tuple[LineageNode, ...]:
        """Returns the versions of a registered model; none if there is no model of that name."""
        return tuple(node for node in self._by_name.get(name, ()) if node.record.version is not None)

    def trained_on(self, data: str) -> tuple[LineageNode, ...]:
        """Returns the models trained (not only evaluated) on a data set, given by name, digest or digest prefix."""
        return tuple(
            node
            for node in self.models
            if any(_is_data(data, dataset) for dataset in node.record.datasets if dataset.context == "training")
        )

    def existing(self, ids: Iterable[str]) -> list[LineageNode]:
        """Returns the nodes with these ids, without those that were deleted."""
        return [self.nodes[id] for id in ids if id in self.nodes]

    def ancestors(self, id: str) -> tuple[str, ...]:
        """Returns the ids of all ancestors of a model, the nearest first; () of a component."""
        return self.graph.ancestors(id) if id in self.graph else ()

    def users(self, component: str) -> tuple[LineageNode, ...]:
        """Returns the models that contain a component."""
        return tuple(node for node in self.models if component in node.record.components)

    def reached_from(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Returns all descendants of the given nodes, the nearest first, without those nodes themselves.

        The models that contain a component count as its descendants.
        """
        models = [id for id in ids if id in self.graph]
        users = [node.id for id in ids if id not in self.graph for node in self.users(id)]
        reached = dict.fromkeys([*users, *self.graph.descendants(*models, *users)])
        return tuple(id for id in reached if id not in set(ids))

    def dataset_names(self) -> list[str]:
        """Returns the names of all data sets."""
        return sorted({dataset.name for node in self.models for dataset in node.record.datasets})

    @cached_property
    def _by_name(self) -> Mapping[str, list[LineageNode]]:
        result: dict[str, list[LineageNode]] = {}
        for node in self.nodes.values():
            for version in node.versions:
                result.setdefault(version.record.registered_name, []).append(version)
        return result

    def _unknown(self, name: str, base: str) -> str:
        if base in self._by_name:
            nodes = sorted(self._by_name[base], key=lambda node: node.record.version or 0)[-8:]
            there = ", ".join("@".join([node.label, *node.aliases[:1]]) for node in nodes)
            return f"{base} has no {name.removeprefix('models:/').removeprefix(base)[1:]!r}. There are {there}"
        return f"the lineage has no model {name!r}. {close_names(base, list(self._by_name))}"


def _ambiguous(text: str, begun: Sequence[LineageNode]) -> str:
    some = ", ".join(f"{node.id} ({node.label})" for node in begun[:4])
    more = f", and {len(begun) - 4} more" if len(begun) > 4 else ""
    return f"{len(begun)} models' ids begin with {text}: {some}{more}. To fix: give more of the id, or a name"


def close_names(name: str, names: Sequence[str]) -> str:
    """Returns a sentence that lists names similar to `name`."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    some = ", ".join(sorted(names)[:5])
    return f"There are {len(names)}: {some}{', ...' if len(names) > 5 else ''}" if names else "There are none yet"


def node_of(row: ModelRow, aliases: Aliases, outcomes: Outcomes | None = None) -> LineageNode:
    """Returns the node for a row of the ledger."""
    outcomes = outcomes or {}
    *others, last = [
        families.record_of(row, name=name, version=number) for name, number in families.versions_of(row.tags)
    ] or [families.record_of(row)]
    node = LineageNode(
        record=last,
        aliases=_aliases_of(last, aliases),
        metrics=row.metrics,
        params=row.params,
        created_ms=row.creation_timestamp,
        is_ready=row.is_ready,
        location=row.artifact_location,
        culprit_by=row.tags.get(families.CULPRIT, ""),
        metric=metric_text(
            row.metrics, main=row.tags.get(families.MAIN_METRIC), num_rows=row.params.get(families.NUM_ROWS)
        ),
        outcome=_outcome_of(last, outcomes),
        is_undone=families.UNDONE in row.tags,
    )
    named = (
        replace(node, record=other, aliases=_aliases_of(other, aliases), outcome=_outcome_of(other, outcomes))
        for other in others
    )
    return replace(node, others=tuple(named))


def _outcome_of(record: ModelRecord, outcomes: Outcomes) -> str | None:
    return None if record.version is None else outcomes.get((record.registered_name, record.version))


def _aliases_of(record: ModelRecord, aliases: Aliases) -> tuple[str, ...]:
    named = aliases.get(record.registered_name, {})
    return tuple(sorted(alias for alias, version in named.items() if version == record.version))


def _parts(text: str) -> tuple[str, str | None, int | None]:
    """Returns (name, alias, version) of NAME, NAME@ALIAS or NAME/VERSION; names of imported models may have a slash."""
    if match := re.fullmatch(r"(.+)@([\w-]+)", text):
        return match[1], match[2], None
    if match := re.fullmatch(r"(.+)/(\d+)", text):
        return match[1], None, int(match[2])
    return text, None, None


def _is_data(name: str, dataset: DatasetInput) -> bool:
    return name in (dataset.name, dataset.label, dataset.digest, dataset.source, dataset.rows_digest) or (
        len(name) >= _SHORTEST_ID and dataset.digest.startswith(name)
    )


def record_differences(first: LineageNode, second: LineageNode) -> dict[str, dict[str, tuple[object, object]]]:
    """Returns the recorded differences as section -> key -> (first value, second value); None means no value."""
    metrics = [{k: v for k, v in n.metrics.items() if not k.startswith(BEHAVIOUR)} for n in (first, second)]
    behaviour = [{k: v for k, v in n.metrics.items() if k.startswith(BEHAVIOUR)} for n in (first, second)]
    data = [{f"{d.context}: {d.name}": d.digest for d in n.record.datasets} for n in (first, second)]
    origins = [{k: v for k, v in vars(n.record.origin).items() if v is not None} for n in (first, second)]
    sections: dict[str, Sequence[Mapping[str, object]]] = {
        "data": data,
        "hyperparameters": [first.params, second.params],
        "metrics": metrics,
        "behaviour": behaviour,
        "origin": origins,
    }
    result = {name: dict(_differing(pair[0], pair[1])) for name, pair in sections.items()}
    return {name: rows for name, rows in result.items() if rows}


def _differing(
    first: Mapping[str, object], second: Mapping[str, object]
) -> Iterator[tuple[str, tuple[object, object]]]:
    for key in dict.fromkeys([*first, *second]):
        if first.get(key) != second.get(key):
            yield key, (first.get(key), second.get(key))


DAY_MS = 86_400_000


def unreached(snapshot: Snapshot, *, now_ms: int, least_age_days: float) -> tuple[LineageNode, ...]:
    """Returns the nodes that may be deleted, children before their parents.

    A model may be deleted if it was recorded at least `least_age_days` ago and neither it nor a descendant has an alias
    or is younger than that. A component of that age may be deleted if only such models contain it. Young models stay,
    with their ancestors, because somebody may want to train them further.
    """
    oldest_ms = now_ms - least_age_days * DAY_MS
    is_named = {node.id: any(version.aliases for version in node.versions) for node in snapshot.models}
    wanted = [node.id for node in snapshot.models if is_named[node.id] or node.created_ms > oldest_ms]
    kept = set(wanted).union(*(snapshot.graph.ancestors(id) for id in wanted))
    dropped = [id for id in reversed(snapshot.graph.models) if id in snapshot.nodes and id not in kept]
    in_use = {component for id in kept if id in snapshot.nodes for component in snapshot.nodes[id].record.components}
    components = [
        node
        for node in snapshot.nodes.values()
        if node.record.kind == COMPONENT and node.id not in in_use and node.created_ms <= oldest_ms
    ]
    return (*(snapshot.nodes[id] for id in dropped), *components)


def collect(ledger: Ledger, store: TensorStore, snapshot: Snapshot, nodes: Sequence[LineageNode]) -> int:
    """Deletes some nodes: their versions, their LoggedModels, then the objects that only they needed in the store.

    A node leaves the registry before its files are deleted, so an interruption at any moment leaves no version without
    its files. A repeated call completes an interrupted one: it also removes from the store what models that no longer
    exist have left there, whoever deleted them. Models of other lineages in the same store stay.

    Returns the number of bytes freed in the tensor store; `mlflow gc` frees the files in MLflow's store. Raises
    LedgerError, or TensorStoreError if the store is damaged.
    """
    for node in nodes:
        for each in node.versions:
            if each.record.version is not None:
                families.unless_missing(
                    ledger.client.delete_model_version, each.record.registered_name, str(each.record.version)
                )
        families.unless_missing(ledger.client.delete_logged_model, node.id)
    left = snapshot.nodes.keys() - {node.id for node in nodes}
    return store.gc(drop=ledger.gone(store.owners(), but=left))


def consistency_errors(snapshot: Snapshot, store: TensorStore) -> list[str]:
    """Returns the faults in the records and in the tensor store as messages, none if all is well. Reads all tensors."""
    names = {node.record.tensors_id: node.label for node in snapshot.models if node.record.tensors_id is not None}
    result = [*_record_errors(snapshot), *store.fsck(names=names)]
    ids = set(store.ids())
    for node in snapshot.models:
        id = node.record.tensors_id
        if id is not None and id not in ids:
            result.append(f"{node.label} is gone from the tensor store. To fix: ringmaster lineage store {node.id}")
    return result


def _record_errors(snapshot: Snapshot) -> list[str]:
    try:
        graph = snapshot.graph
    except ValueError as error:
        return [f"{error}. To fix: correct the tag ringmaster.parents of one of them in MLflow"]
    result = []
    for node in snapshot.models:
        gone = [parent for parent in graph.parents(node.id) if parent not in snapshot.nodes]
        result += [f"{node.label} came from {parent}, which was deleted" for parent in gone]
        if not node.is_ready:
            result.append(f"{node.label} was never completed. To fix: ringmaster run --resume of its batch")
        lost = [component for component in node.record.components if component not in snapshot.nodes]
        result += [f"{node.label} has the component {component}, which was deleted" for component in lost]
    return result
