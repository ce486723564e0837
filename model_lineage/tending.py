"""Keeping a lineage in order: what nothing reaches is dropped, and what is wrong is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringmaster.model_lineage.faults import LedgerError
from ringmaster.model_lineage.ledger import Ledger
from ringmaster.model_lineage.records import COMPONENT
from ringmaster.model_lineage.snapshot import Node, Snapshot
from ringmaster.model_lineage.tensors import TensorStore

DAY_MS = 86_400_000


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What was dropped. freed_bytes: in the tensor store; files in MLflow's store go with `mlflow gc`."""

    nodes: tuple[Node, ...]
    freed_bytes: int


def unreached(snapshot: Snapshot, *, now_ms: int, least_age_days: float) -> tuple[Node, ...]:
    """What may be dropped, children before their parents: models without an alias that no model with one came from,
    and that were recorded at least `least_age_days` ago; and components of none but these.

    Who trains on may want the newest models; so age counts, and the ancestors of young ones stay as well.
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
    """Drops some nodes: their versions, their LoggedModels, then what only they needed in the store.

    A node is gone from the registry before its files are: whatever moment this ends at, no version lacks its files; run
    again, it goes on: what the store has of models that are no more, whoever deleted them, goes too. What another
    lineage keeps in the same store stays. Raises LedgerError, or StoreFault where the store is damaged.
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
    """What is wrong with the records and with the tensors, in words; nothing where all is well. Reads all tensors."""
    found = [*_record_faults(snapshot), *store.fsck()]
    ids = set(store.ids())
    for node in snapshot.models:
        id = node.record.tensors_id
        if id is not None and id not in ids:
            found.append(f"{node.label} is gone from the tensor store. To fix: ringmaster lineage store {node.id}")
    return found


def _is_named(node: Node) -> bool:
    """Whether an alias names the model, as a version of whatever registered model."""
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
