"""The engine of this machine: runs gangs as its own processes.

`FileLeases` is a ledger of the machine's devices on disk, so that processes that share the machine never share a
device. A lease identifies its holder's process by pid and start time. The leases of a process that has ended are void.
The processes that a holder started cannot outlive it (the fork server ensures that), so the devices of a void lease are
free.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from ringmaster.errors import DatabaseFileError
from ringmaster.model_lineage.sqlite_files import fault_of
from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.device_monitor import Telemetry
from ringmaster.tasks.execution.engine import (
    Engine,
    EngineContext,
    EngineNode,
    SegmentCall,
    SegmentTelemetry,
    Spawn,
    completed,
)
from ringmaster.tasks.execution.events import ExecutionEvent, GangReport, SegmentEnded
from ringmaster.tasks.process_identity import identity
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.processes.events import (
    EvaluationReported,
    Event,
    JobReady,
    OutcomeStatus,
    PhaseStarted,
    Steps,
)
from ringmaster.techniques.processes.gang import Gang, Outcome
from ringmaster.techniques.processes.order import Launcher

SCHEMA = """
CREATE TABLE IF NOT EXISTS device_leases (
    device TEXT PRIMARY KEY, holder TEXT NOT NULL, pid INTEGER NOT NULL, born TEXT NOT NULL, since_s REAL NOT NULL
)
"""

END_TIMEOUT_S = 30.0
EVERY_S = 2.0  # per segment: a write costs milliseconds, and people need no finer resolution
MOST_PHASES = 10  # that are written at once; a gang may have one more every `EVERY_S`
MOST_STEPS = 20  # the newest steps of an event, whose losses and seconds are stored


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
        (is_taken,) = self.take_each([devices], holder=holder)
        return is_taken

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

    CPU slots are not sampled, as their metrics say little more than the time.
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


class LocalEngine(Engine):
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

    def is_fenced(self, node: str) -> bool:
        """Returns True: this machine is never lost without this process."""
        return True

    def start(self, call: SegmentCall) -> Future[Outcome]:
        """Starts a segment; returns the future of its outcome."""
        return self._spawn(call.label, lambda: self.run(call))

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


class StepEvents:
    """Writes each gang's progress at intervals, in the form in which a pool's nodes write all events of their gangs.

    The start of another phase is written at once, as the gang may be silent until its end. Phases that follow each
    other quickly, as those of a job that is evaluated at every step, are written at intervals too: each write waits for
    the disk, and the executor for the write.
    """

    PURPOSE = "the progress that other processes read"

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._message_store, self._clock = MessageStore(database), clock
        self._written: dict[int, tuple[int, float]] = {}  # by segment: how many events, and when the last ones were
        self._unstored: dict[int, dict[tuple[str, type[Event]], Event]] = {}  # by segment: newest event of each kind
        self._phases: dict[int, str] = {}
        self._may_write: dict[int, tuple[float, float]] = {}  # by segment: how many phases at once, and since when

    def listen(self, event: ExecutionEvent) -> None:
        """Stores the event if it is about progress, at most one write every `EVERY_S` seconds per segment."""
        if isinstance(event, SegmentEnded):
            self._written.pop(event.number, None)
            self._unstored.pop(event.number, None)
            self._phases.pop(event.number, None)
            self._may_write.pop(event.number, None)
            return
        if not isinstance(event, GangReport) or not isinstance(
            event.event, (Steps, EvaluationReported, PhaseStarted, JobReady)
        ):
            return
        number, report = event.number, event.event
        if isinstance(report, PhaseStarted):
            if self._phases.get(number) == report.phase:  # it goes on, with another timeout
                return
            self._phases[number] = report.phase
        report = report.newest(MOST_STEPS) if isinstance(report, Steps) else report
        unstored, key = self._unstored.setdefault(number, {}), (event.job, type(report))
        unstored.pop(key, None)  # so that they stay in order
        unstored[key] = report
        if isinstance(report, PhaseStarted):
            is_due = self._is_phase_due(number)
        else:
            is_due = isinstance(report, Steps) and self._is_due(number)
        if is_due:
            self._store(number)

    def _is_due(self, number: int) -> bool:
        _, written_s = self._written.get(number, (0, -EVERY_S))
        return self._clock() - written_s >= EVERY_S

    def _is_phase_due(self, number: int) -> bool:
        now_s = self._clock()
        num_left, since_s = self._may_write.get(number, (float(MOST_PHASES), now_s))
        num_left = min(float(MOST_PHASES), num_left + (now_s - since_s) / EVERY_S)
        is_due = num_left >= 1.0
        self._may_write[number] = num_left - is_due, now_s
        return is_due

    def _store(self, number: int) -> None:
        reports = self._unstored.pop(number).values()
        num_written, _ = self._written.get(number, (0, 0.0))
        self._message_store.store(number, "", events=list(enumerate(reports, num_written)))
        self._written[number] = num_written + len(reports), self._clock()
