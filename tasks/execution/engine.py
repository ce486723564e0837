"""Engines, which provide nodes and run the gangs of segments on them: the interface, and the engine of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.cluster import Cluster, Device
from ringmaster.tasks.device_monitor import Telemetry
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.storage.database import Database
from ringmaster.techniques.processes.forkserver_client import ForkServerClient
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import Event, Outcome, OutcomeStatus
from ringmaster.techniques.processes.order import GangOrder

END_TIMEOUT_S = 30.0  # of the gangs of this machine

OnEvent = Callable[[Event], None]

Spawn = Callable[[str, Callable[[], Outcome]], "Future[Outcome]"]
"""Runs a function in the background, under a label that a person sees."""


class SegmentTelemetry:
    """Adds telemetry events to the events of segments. Safe to use from several threads."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._listeners: dict[int, OnEvent] = {}

    @contextmanager
    def segment(self, call: SegmentCall) -> Iterator[OnEvent]:
        """While a segment's gang runs: yields the callback that receives the gang's events."""
        with self._lock:
            self._listeners[call.number] = call.on_event
        self._telemetry.begin(call.number, [number for _, number in call.devices])

        def on_event(event: Event) -> None:
            call.on_event(event)
            # Telemetry of all segments that is due. Gangs send events far more often.
            due = self._telemetry.due_events()
            with self._lock:
                others = [
                    (self._listeners[number], telemetry)
                    for number, telemetry in due.items()
                    if number in self._listeners
                ]
            for other, telemetry in others:
                other(telemetry)

        try:
            yield on_event
        finally:
            with self._lock:
                del self._listeners[call.number]
            if (last := self._telemetry.end(call.number)) is not None:
                call.on_event(last)


@dataclass(frozen=True, kw_only=True)
class EngineNode:
    """A machine that an engine provides.

    name: unique at any time. The node's devices have it in their names in leases, too.
    devices: the node's devices. The number of a device is its position among them.
    incarnation: changes when all that ran on the node has been lost although the node is there, for example because it
        was started again.
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
        """Sets the target node count to `num_nodes`.

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


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """A flow run that serves a node, or is about to, and has not ended.

    id: the flow run's id.
    infrastructure: the id of what it runs on, such as "pods:123"; empty before the work pool's worker has started it.
    is_begun: whether its process has begun.
    is_ending: whether it is being cancelled.
    """

    id: str
    infrastructure: str = ""
    is_begun: bool = False
    is_ending: bool = False


class NodeRuns(Protocol):
    """The flow runs that serve nodes, in a work pool of Prefect. Calls wait for Prefect's server.

    All methods raise ConnectionError while the server is away.
    """

    def live(self) -> Sequence[NodeRun]:
        """Returns the flow runs that have not ended."""

    def start(self) -> str:
        """Starts one more; returns its id."""

    def cancel(self, id: str) -> None:
        """Cancels a flow run; its process is ended in order."""

    def why_ended(self, id: str) -> str:
        """Returns a readable description of how a flow run has ended; empty if that is not known."""


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine may use of its host: `ringmaster run` on this machine, or the executor of a pool.

    folder: where the engine may write files of its own: the folder of the run, or the home of the pool's controller.
    cluster: the devices of this machine that the run may use; empty in the executor of a pool.
    launcher: starts processes on this machine; None in the executor of a pool.
    database: the pool's database, with the guarded write access of the active controller; None outside of a pool.
    spawn: runs what waits for a gang.
    telemetry: adds device metrics to the events of segments on this machine; None where there is nothing to measure.
    node_runs: starts and ends the flow runs that serve nodes; None outside of a pool.
    on_failure: to be called, at most once and from any thread, when the engine can no longer do its work.
    """

    folder: Path
    cluster: Cluster = field(default_factory=lambda: Cluster(nodes=()))
    launcher: ForkServerClient | None = None
    database: Database | None = None
    spawn: Spawn = in_a_thread
    telemetry: SegmentTelemetry | None = None
    node_runs: NodeRuns | None = None
    on_failure: Callable[[], None] = lambda: None


def completed(outcome: Outcome) -> Future[Outcome]:
    """Returns a future that has its outcome already."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


# -- the engine of this machine --------------------------------------------------------------------------------------


@contextmanager
def watching(cluster: Cluster) -> Iterator[SegmentTelemetry | None]:
    """Samples the GPUs of this machine while the context is open. Yields None if it has none.

    CPU slots are not sampled, as their metrics add little to the time.
    """
    (node,) = cluster.nodes
    if not any(device.kind == "gpu" for device in node.devices):
        yield None
        return
    telemetry = Telemetry(node.name, node.devices)
    telemetry.start()
    try:
        yield SegmentTelemetry(telemetry)
    finally:
        telemetry.close()


class LocalEngine:
    """Runs segments on this machine; their gangs end with this process."""

    def __init__(self, context: EngineContext) -> None:
        if context.launcher is None:
            raise ValueError("engine 'local' runs segments where `ringmaster run` runs. To fix: name another engine")
        self._launcher, self._spawn, self._telemetry = context.launcher, context.spawn, context.telemetry
        self._nodes = tuple(EngineNode(name=node.name, devices=node.devices) for node in context.cluster.nodes)
        self._ended = threading.Condition()
        self._gangs: dict[int, Gang] = {}  # by segment
        self._early: dict[int, list[str]] = {}  # commands to gangs that have not started yet

    def nodes(self) -> Sequence[EngineNode]:
        """Returns this machine."""
        return self._nodes

    def request(self, num_nodes: int) -> None:
        """Does nothing: this machine is all there is."""

    def release(self, node: str) -> None:
        """Does nothing: this machine stays."""

    def catch_up(self) -> None:
        """Does nothing: events are passed on as they come."""

    def is_fenced(self, node: str) -> bool:
        """Returns True: this machine is never lost without this process."""
        return True

    def start(self, call: SegmentCall) -> Future[Outcome]:
        """Starts a segment; returns the future of its outcome."""
        return self._spawn(call.label, partial(self.run, call))

    def adopt(self, number: int, *, on_event: Callable[[Event], None]) -> Future[Outcome]:
        """Returns a lost outcome: gangs of this machine do not outlive the process that started them."""
        message = "its gang ended with the process that had started it"
        return completed(Outcome(status=OutcomeStatus.LOST, message=message))

    def run(self, call: SegmentCall) -> Outcome:
        """Runs a gang to its end; returns its outcome once its devices are free."""
        with nullcontext(call.on_event) if self._telemetry is None else self._telemetry.segment(call) as on_event:
            gang = Gang(self._launcher, call.order, num_ranks=call.num_ranks)
            with self._ended:
                self._gangs[call.number] = gang
                for command in self._early.pop(call.number, ()):
                    gang.send(command)
            try:
                return gang.wait(on_event)
            finally:
                with self._ended:
                    del self._gangs[call.number]
                    self._ended.notify_all()

    def send(self, number: int, command: str) -> None:
        """Sends a command to the gang of a segment, or stores it until the gang starts."""
        with self._ended:
            if number in self._gangs:
                self._gangs[number].send(command)
            else:
                self._early.setdefault(number, []).append(command)

    def close(self) -> None:
        """Kills every gang, and waits until all devices are free, for at most `END_TIMEOUT_S` seconds."""
        with self._ended:
            for gang in self._gangs.values():
                gang.kill()
            self._ended.wait_for(lambda: not self._gangs, timeout=END_TIMEOUT_S)
