"""A snapshot of the lineage in memory: models by name, ancestry, differences, garbage collection, consistency."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ringmaster.errors import LedgerError, UnknownModel
from ringmaster.model_lineage.graph import Graph
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.ledger.registry import CULPRIT, record_of, versions_of
from ringmaster.model_lineage.ledger.rows import Aliases, ModelRow, read_rows
from ringmaster.model_lineage.records import CHAMPION, COMPONENT, DatasetInput, ModelRecord
from ringmaster.model_lineage.tensors import TensorStore

BEHAVIOUR = "behaviour/"  # prefix of the metrics of behavioural tests
_SHORTEST_ID = 6  # the shortest prefix of a model's id or a data set's digest that is accepted


@dataclass(frozen=True, kw_only=True)
class LineageNode:
    """A model or a component, with all of its recorded metadata.

    aliases: the aliases of this version.
    others: the same model as versions of its other names, for example as the best trial of a sweep.
    metrics: the last value of each held-out metric.
    culprit_by: the test by which a bisection found that a fault began with this model; empty if none did.
    location: the URI of the model's files.
    """

    record: ModelRecord
    aliases: tuple[str, ...] = ()
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
        rows, aliases = read_rows(ledger, cache=cache, is_fresh=is_fresh)
        return cls(node_of(row, aliases) for row in rows)

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

        A name alone stands for its champion, or for its newest version if it has no champion. Raises UnknownModel.
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
        versions = self._by_name.get(base, [])
        if alias is not None:
            versions = [node for node in versions if alias in node.aliases]
        elif version is not None:
            versions = [node for node in versions if node.record.version == version]
        if not versions:
            raise UnknownModel(self._unknown(name, base))
        champions = [node for node in versions if CHAMPION in node.aliases]
        return max(champions or versions, key=lambda node: (node.record.version or 0, node.created_ms))

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


def node_of(row: ModelRow, aliases: Aliases) -> LineageNode:
    """Returns the node for a row of the ledger."""
    *others, last = [record_of(row, name=name, version=number) for name, number in versions_of(row.tags)] or [
        record_of(row)
    ]
    node = LineageNode(
        record=last,
        aliases=_aliases_of(last, aliases),
        metrics=row.metrics,
        params=row.params,
        created_ms=row.creation_timestamp,
        is_ready=row.is_ready,
        location=row.artifact_location,
        culprit_by=row.tags.get(CULPRIT, ""),
    )
    return replace(
        node, others=tuple(replace(node, record=other, aliases=_aliases_of(other, aliases)) for other in others)
    )


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
    """Returns the recorded differences as section -> key -> (first value, second value); None stands for no value."""
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
                _unless_gone(ledger.client.delete_model_version, each.record.registered_name, str(each.record.version))
        _unless_gone(ledger.client.delete_logged_model, node.id)
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


def _unless_gone(delete: Callable[..., None], *arguments: str) -> None:
    try:
        delete(*arguments)
    except LedgerError as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
