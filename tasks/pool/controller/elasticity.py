"""The policy of an elastic pool: how many nodes are requested of its engine, and which are given back.

With n nodes of d devices, and d0 devices of one's own, work of W device seconds takes about W / (d0 + n d) seconds. The
n-th node is requested while that is longer than a node takes to come: it would be used for longer than it is waited
for. Where nodes have a price, they are requested while each certainly gains more than it costs instead
(`ringmaster.tasks.planning.whatif.nodes`). A node is given back after an idle time, if fewer nodes are wanted than
there are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringmaster.tasks.planning.whatif.nodes import NodePrices

DEFAULT_IDLE_S = 300.0
DEFAULT_COME_S = 60.0
"""The time that a node is expected to take to come, before one has come."""
NUM_KEPT = 9


@dataclass(frozen=True, kw_only=True)
class ElasticityOptions:
    """The limits of an elastic pool.

    max_nodes: the most nodes that the engine lends at a time.
    idle_s: seconds without work after which a node is given back.
    prices: what nodes cost; None where that does not matter.
    """

    max_nodes: int
    idle_s: float = DEFAULT_IDLE_S
    prices: NodePrices | None = None


@dataclass(frozen=True, kw_only=True)
class JobDemand:
    """What is left of a job.

    device_s: the least device seconds over its options.
    least_devices, most_devices: devices of the smallest and the largest gang that can train it.
    """

    device_s: float
    least_devices: int
    most_devices: int


def node_range(
    jobs: Sequence[JobDemand], *, devices_per_node: int, num_own_devices: int, max_nodes: int
) -> tuple[int, int]:
    """Returns how many nodes jobs need at least, and can use at most, besides the devices of one's own.

    At least, there are enough for the largest of the smallest gangs; at most, for the largest gangs of all jobs.
    """
    if not jobs:
        return 0, 0
    needed = _nodes_for(max(job.least_devices for job in jobs) - num_own_devices, devices_per_node)
    usable = _nodes_for(sum(job.most_devices for job in jobs) - num_own_devices, devices_per_node)
    least = max(needed, 1 if num_own_devices == 0 else 0)
    return min(least, max_nodes), min(max(least, usable), max_nodes)


def num_nodes_wanted(
    jobs: Sequence[JobDemand], *, devices_per_node: int, num_own_devices: int, come_s: float, max_nodes: int
) -> int:
    """Returns how many nodes an engine should lend, besides the devices of one's own, if nodes have no price."""
    least, most = node_range(
        jobs, devices_per_node=devices_per_node, num_own_devices=num_own_devices, max_nodes=max_nodes
    )
    work_s = sum(job.device_s for job in jobs)
    used = math.floor((work_s / max(come_s, 1e-9) - num_own_devices) / devices_per_node)
    return min(max(least, used), most)


def _nodes_for(num_devices: int, devices_per_node: int) -> int:
    return max(math.ceil(num_devices / devices_per_node), 0)


class ComingTimes:
    """Measures how long nodes take from their request until they serve. clock values are monotonic seconds."""

    def __init__(self) -> None:
        self._requested_s: deque[float] = deque()
        self._took_s: deque[float] = deque(maxlen=NUM_KEPT)

    @property
    def come_s(self) -> float:
        """The median of the last times; a default before the first."""
        return statistics.median(self._took_s) if self._took_s else DEFAULT_COME_S

    def requested(self, num_missing: int, *, now_s: float) -> None:
        """Notes that so many nodes are requested and not there."""
        while len(self._requested_s) < num_missing:
            self._requested_s.append(now_s)
        while len(self._requested_s) > num_missing:
            self._requested_s.pop()

    def came(self, num_nodes: int, *, now_s: float) -> None:
        """Notes that nodes have come."""
        for _ in range(min(num_nodes, len(self._requested_s))):
            self._took_s.append(now_s - self._requested_s.popleft())


class IdleTimes:
    """Measures how long nodes have been without work."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def note(self, idle: Collection[str], *, now_s: float) -> None:
        """Notes which nodes are without work now."""
        self._since_s = {node: self._since_s.get(node, now_s) for node in idle}

    def longer_than(self, idle_s: float, *, now_s: float) -> list[str]:
        """Returns the nodes that have been without work for that long, the longest first."""
        found = [node for node, since_s in self._since_s.items() if now_s - since_s >= idle_s]
        return sorted(found, key=lambda node: (self._since_s[node], node))
