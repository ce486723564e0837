"""The interface of a node provider: what lends machines to a pool for a time, such as a batch scheduler.

A provider starts and ends *allocations*. In each allocation a node agent registers itself as a node of the pool, under
the allocation's id. From then on the agent takes orders from the pool's database, as on a machine of one's own. The
provider reports the state of the machine from the engine: how long it is lent, and whether its processes have ended.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum


class AllocationStatus(StrEnum):
    """The state of an allocation in the engine."""

    PENDING = "pending"  # waits in the engine's queue
    RUNNING = "running"
    LEAVING = "leaving"  # takes no new segments, for example because the machine is drained
    LOST = "lost"  # the engine cannot reach the machine: its processes may still run, until the node's own fence
    ENDED = "ended"  # no process of it runs any more


GONE = (AllocationStatus.LOST, AllocationStatus.ENDED)
"""Of an allocation whose node gets no segments any more, even if it still sends heartbeats."""
MAX_REMEMBERED = 10_000  # allocations that are gone


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A machine that an engine lends, or is about to lend.

    id: the engine's id, under which the allocation's node registers itself.
    until_s: when the engine takes the machine back, in seconds since the epoch; None if that is not known.
    why: why the allocation leaves, is lost or has ended, to follow the node's name.
    """

    id: str
    status: AllocationStatus
    until_s: float | None = None
    why: str = ""


class NodeProvider:
    """Lends machines to a pool; this one lends none: users start workers on machines of their own.

    All methods are thread-safe, and none waits for the engine.

    An engine that does not answer changes nothing: `allocations` returns what it said last.
    """

    def request(self, num_nodes: int) -> None:
        """Sets the target number of running and pending allocations to `num_nodes`.

        With fewer than before, pending allocations are withdrawn; running ones stay until they are released.
        """

    def release(self, allocation: str) -> None:
        """Gives a machine back, on which nothing runs any more; does nothing if it is gone already."""

    def allocations(self) -> Mapping[str, Allocation]:
        """Returns the allocations that the engine last reported, by id: all that live, and those that ended lately."""
        return {}

    def served(self, allocations: Collection[str]) -> None:
        """Notes under which allocations nodes have registered: those have come, and others may yet fail to."""

    def close(self) -> None:
        """Stops asking the engine. Allocations stay: the next controller's provider finds them again."""
