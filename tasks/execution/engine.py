"""`Engine`, which provides nodes and runs the gangs of segments on them, and `LocalEngine`, that of this machine.

`FileLeases` is a ledger of the machine's devices on disk, so
that processes that share the machine never share a device. A lease identifies its holder's process by pid and start
time. The leases of a process that has ended are void. The processes that a holder started cannot outlive it (the fork
server ensures that), so the devices of a void lease are free.
"""

from __future__ import annotations

import math
import os
import platform
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from ringmaster.errors import DatabaseFileError
from ringmaster.model_lineage.sqlite_files import fault_of
from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.cluster import Cluster, Device
from ringmaster.tasks.device_monitor import Telemetry
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.events import ExecutionEvent, GangReport, SegmentEnded
from ringmaster.tasks.process_identity import identity
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.processes.events import (
    EvaluationReported,
    Event,
    JobReady,
    Outcome,
    OutcomeStatus,
    PhaseStarted,
    Steps,
)
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.order import GangOrder, Launcher

Say = Callable[[Event], None]

Spawn = Callable[[str, Callable[[], Outcome]], "Future[Outcome]"]
"""Runs a function in the background, under a label that a person sees."""


class SegmentTelemetry:
    """Adds telemetry events to the events of segments. Safe to use from several threads."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._says: dict[int, Say] = {}

    @contextmanager
    def segment(self, call: SegmentCall) -> Iterator[Say]:
        """While a segment's gang runs: yields the callback that receives the gang's events."""
        with self._lock:
            self._says[call.number] = call.on_event
        self._telemetry.begin(call.number, [number for _, number in call.devices])

        def say(event: Event) -> None:
            call.on_event(event)
            # Telemetry of all segments that is due. Gangs send events far more often.
            due = self._telemetry.due_events()
            with self._lock:
                others = [(self._says[number], telemetry) for number, telemetry in due.items() if number in self._says]
            for other, telemetry in others:
                other(telemetry)

        try:
            yield say
        finally:
            with self._lock:
                del self._says[call.number]
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
    infrastructure: the id of what it runs on, such as "slurm:123"; empty before the work pool's worker has started it.
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
    launcher: Launcher | None = None
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


SCHEMA = """
CREATE TABLE IF NOT EXISTS device_leases (
    device TEXT PRIMARY KEY, holder TEXT NOT NULL, pid INTEGER NOT NULL, born TEXT NOT NULL, since_s REAL NOT NULL
)
"""

END_TIMEOUT_S = 30.0
EVERY_S = 2.0  # per segment: a write costs milliseconds, and pages need no finer resolution
MAX_PHASES = 10  # that are written at once; a gang may have one more every `EVERY_S`
MAX_STEPS = 200  # the newest steps of each write, whose losses and seconds are stored: curves of most jobs are whole


def leases_of(home: Path, cluster: Cluster) -> FileLeases:
    """Returns the ledger of this machine, for the devices of `cluster`.

    Each machine has its own file, as `home` may be on storage that machines share, whose processes are unknown here.
    """
    units = {name: cluster.device(*place).units() for place, name in cluster.lease_names().items()}
    return FileLeases(home / "machines" / (platform.node() or "localhost") / "leases.db", units=units)


class FileLeases:
    """The leases of one machine's devices, named "node:kind:number". Safe between threads and between processes.

    units: what each device consists of, which decides whether devices of two processes are the same: processes see
        different GPUs under one number, and divide the cores into different numbers of slots.
    """

    def __init__(self, file: Path, *, units: Mapping[str, Collection[str]] | None = None) -> None:
        self._units = units or {}
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        try:
            with self._transaction() as db:
                db.execute(SCHEMA)
        except sqlite3.Error as error:
            if fault := fault_of(file, contents="who holds which device of this machine now"):
                raise DatabaseFileError([fault]) from error
            raise

    def take(self, devices: Sequence[str], *, holder: str) -> bool:
        """Leases all of `devices` to `holder`, or none if one is leased already. Returns whether it did."""
        return self.take_each([devices], holder=holder)[0]

    def take_each(self, gangs: Sequence[Sequence[str]], *, holder: str) -> list[bool]:
        """Leases the devices of each gang as `take` does, in one transaction. Returns which were leased."""
        pid = os.getpid()
        born = identity(pid)
        with self._transaction() as db:
            busy, are_taken = {*self._held(db)}, []
            for gang in map(self._units_of, gangs):
                are_taken.append(busy.isdisjoint(gang))
                if are_taken[-1]:
                    busy.update(gang)
                    rows = [(unit, holder, pid, born, time.time()) for unit in gang]
                    db.executemany("INSERT OR REPLACE INTO device_leases VALUES (?, ?, ?, ?, ?)", rows)
        return are_taken

    def give_back(self, devices: Sequence[str]) -> None:
        """Ends this process's leases of `devices`."""
        with self._transaction() as db:
            rows = [(unit, os.getpid()) for unit in self._units_of(devices)]
            db.executemany("DELETE FROM device_leases WHERE device = ? AND pid = ?", rows)

    def held(self) -> dict[str, str]:
        """Returns the holder of each device that is leased now, by the names of `units`."""
        with self._transaction() as db:
            held = self._held(db)
        if not self._units:
            return held
        return {name: held[unit] for name, units in self._units.items() for unit in units if unit in held}

    def _units_of(self, devices: Sequence[str]) -> list[str]:
        return [unit for device in devices for unit in self._units.get(device, (device,))]

    def processes(self) -> dict[str, int]:
        """Returns the process id of each holder of a device that is leased now."""
        with self._transaction() as db:
            rows = db.execute("SELECT holder, pid, born FROM device_leases").fetchall()
        return {holder: pid for holder, pid, born in rows if identity(pid) == born}

    def _held(self, db: sqlite3.Connection) -> dict[str, str]:
        rows = db.execute("SELECT device, holder, pid, born FROM device_leases").fetchall()
        return {device: holder for device, holder, pid, born in rows if identity(pid) == born}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._file, isolation_level=None, timeout=30)) as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")


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


def local(context: EngineContext) -> LocalEngine:
    """Builds the engine of this machine."""
    if context.launcher is None:
        raise ValueError("engine 'local' runs segments where `ringmaster run` runs. To fix: name another engine")
    return LocalEngine(context.launcher, cluster=context.cluster, spawn=context.spawn, telemetry=context.telemetry)


class LocalEngine:
    """Runs segments on this machine; their gangs end with this process.

    launcher: starts the processes of gangs.
    cluster: the devices of this machine that may be used.
    spawn: runs what waits for a gang.
    telemetry: adds device metrics to the events of each segment, or None.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        cluster: Cluster,
        spawn: Spawn = in_a_thread,
        telemetry: SegmentTelemetry | None = None,
    ) -> None:
        self._launcher, self._spawn, self._telemetry = launcher, spawn, telemetry
        self._nodes = tuple(EngineNode(name=node.name, devices=node.devices) for node in cluster.nodes)
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


@dataclass
class _UnstoredEvents:
    """What a gang has reported that is not stored yet.

    events: the newest of each kind, by job and kind.
    num_stored, stored_s: how many events are stored, and when the last ones were.
    num_phases, since_s: how many phases may be stored at once, and since when.
    """

    since_s: float
    events: dict[tuple[str, type[Event]], Event] = field(default_factory=dict)
    num_stored: int = 0
    stored_s: float = -math.inf
    phase: str = ""
    num_phases: float = MAX_PHASES


class StepEvents:
    """Writes each gang's progress at intervals, in the form in which a pool's nodes write all events of their gangs.

    The start of another phase is written at once, as the gang may be silent until its end. Phases that follow each
    other quickly, as those of a job that is evaluated at every step, are written at intervals too: each write waits for
    the disk, and the executor for the write.
    """

    PURPOSE = "the progress that other processes read"

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._message_store, self._clock = MessageStore(database), clock
        self._unstored: dict[int, _UnstoredEvents] = {}  # by segment

    def listen(self, event: ExecutionEvent) -> None:
        """Stores the event if it is about progress, at most one write every `EVERY_S` seconds per segment.

        The steps since the last write are stored as one event, and what is left once the segment ends.
        """
        if isinstance(event, SegmentEnded) and (left := self._unstored.pop(event.number, None)):
            self._store(event.number, left)
        if not isinstance(event, GangReport) or not isinstance(
            event.event, (Steps, EvaluationReported, PhaseStarted, JobReady)
        ):
            return
        report, now_s, is_due = event.event, self._clock(), False
        own = self._unstored.setdefault(event.number, _UnstoredEvents(since_s=now_s))
        if isinstance(report, PhaseStarted):
            if own.phase == report.phase:  # it goes on, with another timeout
                return
            own.phase = report.phase
            num_phases = min(float(MAX_PHASES), own.num_phases + (now_s - own.since_s) / EVERY_S)
            is_due = num_phases >= 1.0
            own.num_phases, own.since_s = num_phases - is_due, now_s
        elif isinstance(report, Steps):
            is_due = now_s - own.stored_s >= EVERY_S
        before = own.events.pop((event.job, type(report)), None)  # so that they stay in order
        if isinstance(report, Steps) and isinstance(before, Steps) and before.step == report.first_step:
            report = _joined(before, report)
        own.events[event.job, type(report)] = report
        if is_due:
            self._store(event.number, own)

    def _store(self, number: int, own: _UnstoredEvents) -> None:
        events = [each.newest(MAX_STEPS) if isinstance(each, Steps) else each for each in own.events.values()]
        if events:
            self._message_store.store(number, "", events=list(enumerate(events, own.num_stored)))
        own.num_stored, own.stored_s = own.num_stored + len(events), self._clock()
        own.events.clear()


def _joined(before: Steps, report: Steps) -> Steps:
    """Returns the report with the steps of the one before it; at most twice as many as are stored."""
    before = before.newest(MAX_STEPS)

    def joined(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
        return (*one, *other) if one and other else ()

    return replace(
        report,
        first_step=before.first_step,
        seconds=(*before.seconds, *report.seconds),
        losses=joined(before.losses, report.losses),
        rewards=joined(before.rewards, report.rewards),
        num_samples=before.num_samples + report.num_samples,
        num_tokens=before.num_tokens + report.num_tokens,
    )
