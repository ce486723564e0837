"""Detection of the nodes that join and leave a pool, from their registry rows and the silence of their workers.

No clocks are compared: a worker counts its heartbeats, and the observer measures the silence between two of them by its
own clock. Time in which the observer could not see heartbeats does not count as silence. After a while in which the
database was unreachable, all nodes get time again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringmaster.tasks.pool.nodes import NodeRecord, Nodes
from ringmaster.tasks.pool.timeouts import BLIND_S


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A worker that is gone for good, with all that it ran.

    why: the cause in words, to follow the node's name.
    """

    node: str
    incarnation: str
    why: str


@dataclass
class _Seen:
    record: NodeRecord
    since_s: float  # the time of its last heartbeat, by our clock


class NodeWatch:
    """Watches the registry of nodes.

    clock: monotonic seconds.
    lost_after_s: the time without a heartbeat after which a node is lost.
    blind_after_s: the time between two checks after which all silences are measured anew.
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
        """The nodes that were present at the last check, by name."""
        return {name: seen.record for name, seen in sorted(self._seen.items())}

    def look(self, *, ended: Mapping[str, str] | None = None) -> Sequence[Gone]:
        """Checks the registry; returns the workers that are gone since the last check.

        A node that was silent for too long is removed from the registry. If its worker lives, it notices that and
        registers anew. So is a node whose allocation has ended; one that registers anew under that allocation is not
        there: the engine may lend its devices to others.

        ended: by id of an allocation whose processes have all ended, why.
        """
        ended = ended or {}
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
            elif was.allocation in ended:
                gone.append(self._remove(was, why=ended[was.allocation]))
                del registered[name]
            elif record.beats != was.beats or is_blind:
                seen.since_s = now_s
            elif now_s - seen.since_s >= self._lost_after_s:
                gone.append(self._remove(was, why=f"silent for {now_s - seen.since_s:.0f} s"))
                del registered[name]
        for name, record in registered.items():
            if record.allocation in ended:
                continue
            self._seen.setdefault(name, _Seen(record, now_s)).record = record
        return gone

    def _remove(self, record: NodeRecord, *, why: str) -> Gone:
        self._nodes.remove(record.name, incarnation=record.incarnation)
        del self._seen[record.name]
        return Gone(node=record.name, incarnation=record.incarnation, why=why)
