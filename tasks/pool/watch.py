"""Which nodes of a pool are there: what their workers write, and how long they have been silent.

No clocks are compared: a worker counts its beats, and the silence between two of them is measured by the watcher's own
clock. What could not be seen is no silence: after a while in which the database was away, all nodes get time again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.pool.nodes import LEAVING, NodeRecord, Nodes

BLIND_S = 10.0  # between two looks, after which silences are counted anew


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A worker that is gone for good, with all that it ran; `why` in words, to follow the node's name."""

    node: str
    incarnation: str
    why: str


@dataclass
class _Seen:
    record: NodeRecord
    since_s: float  # of its last beat, by our clock


class NodeWatch:
    """Watches the registry. clock: monotonic seconds. lost_after_s: without a beat. blind_after_s: between two looks,
    after which silences are counted anew.
    """

    def __init__(
        self, nodes: Nodes, *, clock: Callable[[], float], lost_after_s: float, blind_after_s: float = BLIND_S
    ) -> None:
        self._nodes, self._clock = nodes, clock
        self._lost_after_s, self._blind_after_s = lost_after_s, blind_after_s
        self._seen: dict[str, _Seen] = {}
        self._looked_s = clock()

    @property
    def there(self) -> Mapping[str, NodeRecord]:
        """The nodes that were there at the last look, by name."""
        return {name: seen.record for name, seen in sorted(self._seen.items())}

    def look(self) -> Sequence[Gone]:
        """Looks at the registry; returns the workers that are gone since the last look.

        Who was silent for too long is taken from the registry: should it live, it finds out and begins anew.
        """
        registered = {record.name: record for record in self._nodes.all()}
        now_s = self._clock()
        is_blind = now_s - self._looked_s > self._blind_after_s
        self._looked_s = now_s
        gone = []
        for name, seen in list(self._seen.items()):
            record, was = registered.get(name), seen.record
            if record is None or record.incarnation != was.incarnation:
                why = "its worker has ended" if record is None else "its worker was started anew"
                gone.append(Gone(node=name, incarnation=was.incarnation, why=why))
                del self._seen[name]
            elif record.beats != was.beats or is_blind:
                seen.since_s = now_s
            elif now_s - seen.since_s >= self._lost_after_s:
                self._nodes.remove(name, incarnation=was.incarnation)
                gone.append(
                    Gone(node=name, incarnation=was.incarnation, why=f"silent for {now_s - seen.since_s:.0f} s")
                )
                del self._seen[name], registered[name]
        for name, record in registered.items():
            self._seen.setdefault(name, _Seen(record, now_s)).record = record
        return gone


def cluster_of(there: Mapping[str, NodeRecord], *, ghosts: Mapping[str, Node]) -> tuple[Cluster, frozenset[DeviceId]]:
    """The devices of all nodes, and those of them that must not be used: unhealthy, or of nodes that leave.

    ghosts: nodes that are gone, by name, while a segment has yet to end that ran there.
    """
    haunted = [ghost for name, ghost in ghosts.items() if name not in there]
    nodes = [*haunted, *(Node(name=record.name, devices=record.devices) for record in there.values())]
    out = {(ghost.name, number) for ghost in haunted for number in range(len(ghost.devices))}
    for record in there.values():
        numbers = record.health if record.status != LEAVING else range(len(record.devices))
        out |= {(record.name, int(number)) for number in numbers}
    return Cluster(nodes=tuple(sorted(nodes, key=lambda node: node.name))), frozenset(out)
