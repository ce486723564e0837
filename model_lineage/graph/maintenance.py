"""Garbage collection and consistency checks of a lineage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringmaster.errors import LedgerError
from ringmaster.model_lineage.graph.snapshot import Node, Snapshot
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import COMPONENT
from ringmaster.model_lineage.tensors import TensorStore

DAY_MS = 86_400_000


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The deleted nodes, and the space freed in the tensor store. `mlflow gc` frees the files in MLflow's store."""

    nodes: tuple[Node, ...]
    freed_bytes: int


def unreached(snapshot: Snapshot, *, now_ms: int, least_age_days: float) -> tuple[Node, ...]:
    """Returns the nodes that may be deleted, children before their parents.

    A model may be deleted if it was recorded at least `least_age_days` ago and neither it nor a descendant has an alias
    or is younger than that. A component of that age may be deleted if only such models contain it. Young models stay,
    with their ancestors, because somebody may want to train them further.
    """
    oldest_ms = now_ms - least_age_days * DAY_MS
    wanted = [node.id for node in snapshot.models if _is_named(node) or node.created_ms > oldest_ms]
    kept = set(wanted).union(*(snapshot.graph.ancestors(id) for id in wanted))
    dropped = [id for id in reversed(snapshot.graph.models) if id in snapshot.nodes and id not in kept]
    in_use = {component for id in kept if id in snapshot.nodes for component in snapshot.nodes[id].record.components}
    components = [
        node
        for node in snapshot.nodes.values()
        if node.record.kind == COMPONENT and node.id not in in_use and node.created_ms <= oldest_ms
    ]
    return (*(snapshot.nodes[id] for id in dropped), *components)


def collect(ledger: Ledger, store: TensorStore, snapshot: Snapshot, nodes: Sequence[Node]) -> Collected:
    """Deletes some nodes: their versions, their LoggedModels, then the objects that only they needed in the store.

    A node leaves the registry before its files are deleted, so an interruption at any moment leaves no version without
    its files. A repeated call completes an interrupted one: it also removes from the store what models that no longer
    exist have left there, whoever deleted them. Models of other lineages in the same store stay. Raises LedgerError, or
    TensorStoreError if the store is damaged.
    """
    for node in nodes:
        for each in node.versions:
            if each.record.version is not None:
                _unless_gone(ledger.client.delete_model_version, each.record.registered_name, str(each.record.version))
        _unless_gone(ledger.client.delete_logged_model, node.id)
    left = snapshot.nodes.keys() - {node.id for node in nodes}
    freed = store.gc(drop=ledger.gone(store.owners(), but=left))
    return Collected(nodes=tuple(nodes), freed_bytes=freed)


def faults(snapshot: Snapshot, store: TensorStore) -> list[str]:
    """Returns the faults in the records and in the tensor store as messages, none if all is well. Reads all tensors."""
    found = [*_record_faults(snapshot), *store.fsck()]
    ids = set(store.ids())
    for node in snapshot.models:
        id = node.record.tensors_id
        if id is not None and id not in ids:
            found.append(f"{node.label} is gone from the tensor store. To fix: ringmaster lineage store {node.id}")
    return found


def _is_named(node: Node) -> bool:
    """Whether any version of the model, under any registered name, has an alias."""
    return any(version.aliases for version in node.versions)


def _record_faults(snapshot: Snapshot) -> list[str]:
    try:
        graph = snapshot.graph
    except ValueError as error:
        return [f"{error}. To fix: correct the tag ringmaster.parents of one of them in MLflow"]
    found = []
    for node in snapshot.models:
        gone = [parent for parent in graph.parents(node.id) if parent not in snapshot.nodes]
        found += [f"{node.label} came from {parent}, which was deleted" for parent in gone]
        if not node.is_ready:
            found.append(f"{node.label} was never completed. To fix: ringmaster run --resume of its batch")
        lost = [component for component in node.record.components if component not in snapshot.nodes]
        found += [f"{node.label} has the component {component}, which was deleted" for component in lost]
    return found


def _unless_gone(delete: Callable[..., None], *arguments: str) -> None:
    try:
        delete(*arguments)
    except LedgerError as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
