"""The interface of an engine: what provides machines and runs the gangs of segments on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.techniques.processes.events import Event
from ringmaster.techniques.processes.gang import Outcome
from ringmaster.techniques.processes.order import GangOrder


@dataclass(frozen=True, kw_only=True)
class EngineNode:
    """A machine that an engine provides.

    name: unique at any time. The node's devices have it in their names in leases, too.
    devices: the node's devices. The number of a device is its position among them.
    incarnation: changes when all that ran on the node has been lost although the node is there, for example because it
        was started anew.
    until_s: when the node goes away, in seconds since the epoch; None if that is not known.
    is_lent: whether the engine lends the node for a time, and takes it back by `release`.
    is_leaving: whether the node takes no new segments. Those that run there have to stop.
    faults: by device number, why that device must not be used.
    """

    name: str
    devices: tuple[Device, ...]
    incarnation: str = ""
    until_s: float | None = None
    is_lent: bool = False
    is_leaving: bool = False
    faults: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SegmentCall:
    """A segment to start: the order of its gang, its number of ranks, and the callback for its events.

    number: the segment's number in the journal, which identifies it.
    job: the executor's name of the job, in a pool "BATCH/JOB".
    batch: the batch of a pool; empty without a pool.
    devices: the devices of the order's slots, in the same order.
    """

    label: str
    order: GangOrder
    num_ranks: int
    on_event: Callable[[Event], None]
    number: int
    job: str
    batch: str
    devices: tuple[DeviceId, ...]


@runtime_checkable
class Engine(Protocol):
    """Provides nodes and runs segments on them. All methods are thread-safe, and none waits for a gang.

    The executor and what commands it see nothing else of what runs underneath: this machine, or the nodes of a pool.
    """

    def nodes(self) -> Sequence[EngineNode]:
        """Returns the nodes that are there now.

        Called about once a second, on the executor's thread. A node that has been lost is not among them any more, or
        is there with another incarnation; the segments that ran on it have the outcome `LOST` by then.
        """

    def request(self, num_nodes: int) -> None:
        """Asks for nodes until `num_nodes` of them are there or on their way, for as long as no other number is asked.

        An engine with a fixed set of machines does nothing.
        """

    def release(self, node: str) -> None:
        """Gives back a node on which nothing runs any more; does nothing if it is gone, or given back, already.

        An engine with a fixed set of machines does nothing.
        """

    def is_fenced(self, node: str) -> bool:
        """Returns whether no rank can still run on a node that is gone, or of a former incarnation of a node.

        The devices of such a node are not used until this is the case. True for a node of which nothing was ever lost.
        """

    def start(self, call: SegmentCall) -> Future[Outcome]:
        """Starts a segment; returns the future of its outcome, which is set once its devices are free.

        If a node of it is lost, the outcome is `LOST`, even before that node is fenced, as soon as the ranks on the
        other nodes have ended. It is `LOST` at once if a node is gone before the segment has begun. The executor uses
        the future's `add_done_callback` and `result`. Events are passed to `call.on_event` before.
        """

    def adopt(self, number: int, *, on_event: Callable[[Event], None]) -> Future[Outcome]:
        """Takes over a segment that another process has started; its events are passed on again, from the first.

        `nodes` has been called before.
        """

    def send(self, number: int, command: str) -> None:
        """Sends a command to the gang of a segment, even if the gang has not started: `STOP`, or one that `until` or
        `leave` returns.
        """

    def catch_up(self) -> None:
        """Passes on the events that gangs have stored until now. An engine that passes on events as they come does
        nothing.
        """

    def close(self) -> None:
        """Ends what the engine has started in this process. Gangs end if they cannot outlive this process.

        May be called again.
        """
