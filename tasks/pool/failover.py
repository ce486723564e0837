"""Failover: the state of a batch that a new executor recovers from the journal and the event log.

An executor writes the journal before it acts, and the event log last. The difference between the two shows the next
executor which outcomes it must still decide on and which events it must still log. No event is logged twice.

`Leadership` elects a leader among the executor processes of a pool, so that at most one of them writes. The row in the
database counts the changes of leader (the epoch) and the leader's heartbeats. No clocks are compared. A candidate takes
over when it has seen no heartbeat for `SILENT_S` by its own clock. It takes over at once if it sees that the leader's
process, on the same machine, has ended. A former leader that was only frozen or cut off for a minute finds another
epoch in the transaction in which it wants to write, and writes nothing.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.cluster import Device, Node
from ringmaster.tasks.execution.execution_events import ExecutionEvent, JobEnded, SegmentEnded, SegmentStarted
from ringmaster.tasks.execution.job_progress import is_about
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.execution.starter import OptionKey, is_known, option_key_of, segment_of
from ringmaster.tasks.pool.event_log import BatchEvents
from ringmaster.tasks.pool.nodes import SilenceClock
from ringmaster.tasks.pool.submissions import Submission
from ringmaster.tasks.process_identity import has_ended, own_process
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, Journal, SegmentRecord
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import EVENT_LOG, EXECUTOR, json_field
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.gang_events import Outcome, OutcomeStatus

T = TypeVar("T")

BEAT_EVERY_S = 3.0
SILENT_S = 15.0  # without a heartbeat, after which a candidate takes over
BLIND_S = 6.0  # between two checks, after which the silence is measured again
NOBODY = ""
ROW = EXECUTOR.c.id == 1


class LeadershipLost(SQLAlchemyError):
    """Raised when another controller leads: the write was not carried out, and this process must end."""


class Leadership:
    """One process's claim to lead.

    Call `claim` until it returns True. From then on, call `beat` every `BEAT_EVERY_S`, and write only through
    `guarded`.

    clock: monotonic seconds.
    where: the identity of this process.
    has_ended: returns whether the process with an identity has ended.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float] = time.monotonic,
        silent_s: float = SILENT_S,
        where: str | None = None,
        has_ended: Callable[[str], bool] = has_ended,
    ) -> None:
        self._database, self._silent_s, self._has_ended = database, silent_s, has_ended
        # No leader could send heartbeats while the database was unreachable, so the silence is measured again.
        self._silences = SilenceClock(clock, blind_s=BLIND_S)
        self._me = f"{uuid.uuid4().hex} {own_process() if where is None else where}"
        self.epoch = 0  # of this leader; 0 before it leads
        self._seen: tuple[int, int] | None = None  # the epoch and the heartbeats of the leader

    def claim(self) -> bool:
        """Takes the lead if nobody has it or the leader has been silent for `silent_s`; returns whether it did."""
        result = self._database.read(lambda connection: connection.execute(select(EXECUTOR).where(ROW)).one_or_none())
        is_free = result is None or result.owner == NOBODY or self._has_ended(result.owner.partition(" ")[2])
        self._seen = None if result is None else (int(result.epoch), int(result.beats))
        silence_s = self._silences.silences_s({"leader": self._seen})["leader"]
        if not is_free and silence_s < self._silent_s:
            return False
        self.epoch = self._database.write(self._take)
        return self.epoch > 0

    def beat(self) -> bool:
        """Stores a heartbeat of this leader; returns False once another one leads."""
        own = ROW & (EXECUTOR.c.owner == self._me)
        return self._database.execute(update(EXECUTOR).where(own).values(beats=EXECUTOR.c.beats + 1)) > 0

    def resign(self, database: Database | None = None) -> None:
        """Gives up the lead, so that a candidate can take over at once.

        database: another connection to the same database, with shorter timeouts.
        """
        own = ROW & (EXECUTOR.c.owner == self._me)
        (database or self._database).execute(update(EXECUTOR).where(own).values(owner=NOBODY))

    def guarded(self, database: Database, *, on_deposed: Callable[[], None]) -> Database:
        """Returns the database with the leader's write access.

        Once another process leads, `write` calls `on_deposed` and raises Deposed.
        """
        return _GuardedDatabase(database, check=self._check, on_deposed=on_deposed)

    def _take(self, connection: Connection) -> int:
        """Returns the new epoch, or 0 if another process was faster."""
        row = connection.execute(select(EXECUTOR).where(ROW)).one_or_none()
        if row is None:
            connection.execute(insert(EXECUTOR).values(id=1, owner=self._me, epoch=1, beats=0))
            return 1
        if row.owner == self._me:  # a retry of a transaction that was committed before
            return int(row.epoch)
        if (row.epoch, row.beats) != self._seen:
            return 0
        epoch = int(row.epoch) + 1
        connection.execute(update(EXECUTOR).where(ROW).values(owner=self._me, epoch=epoch, beats=0))
        return epoch

    def _check(self, connection: Connection) -> None:
        row = connection.execute(select(EXECUTOR.c.owner, EXECUTOR.c.epoch).where(ROW)).one_or_none()
        if row is None or (row.owner, row.epoch) != (self._me, self.epoch):
            raise LeadershipLost("another controller leads this pool now")


class _GuardedDatabase(Database):
    """A database that checks the leadership before each write, in the same transaction."""

    def __init__(
        self, database: Database, *, check: Callable[[Connection], None], on_deposed: Callable[[], None]
    ) -> None:
        self.url = database.url
        self._database, self._check, self._on_deposed = database, check, on_deposed

    def write(self, act: Callable[[Connection], T]) -> T:
        def checked(connection: Connection) -> T:
            self._check(connection)
            return act(connection)

        try:
            return self._database.write(checked)
        except LeadershipLost:
            self._on_deposed()
            raise

    def read(self, act: Callable[[Connection], T]) -> T:
        return self._database.read(act)

    def close(self) -> None:
        self._database.close()


@dataclass(frozen=True, kw_only=True)
class BatchState:
    """The stored state of a batch, new or of a former controller, with the batch's own job names.

    open: the segments that have no outcome in the journal.
    undecided: the segments that have an outcome in the journal, but no decision on it.
    past: the other segments of jobs that have not ended.
    struck_out: by job, the options that ran out of memory.
    missing_events: the events that are missing in the event log.
    """

    batch: Submission
    jobs: Mapping[str, JobRecord]
    open: Sequence[SegmentRecord]
    undecided: Sequence[SegmentRecord]
    past: Sequence[SegmentRecord]
    struck_out: Mapping[str, frozenset[OptionKey]]
    missing_events: Sequence[ExecutionEvent]

    def qualified(self, record: SegmentRecord) -> SegmentRecord:
        """Returns a segment with its job's name in the pool."""
        return replace(record, job=self.batch.qualified(record.job))


def read_batch_state(database: Database, batch: Submission) -> BatchState:
    """Reads the state of a batch; resets jobs that the journal calls running although they have no segment."""
    journal = Journal(database, batch=batch.id)
    segments, jobs = journal.segments(), journal.jobs()
    last = {segment.job: segment for segment in segments}
    for name, record in jobs.items():
        if record.status == JobStatus.RUNNING and name not in last:
            jobs[name] = journal.write_job(name, status=JobStatus.WAITING)
    undecided = [s for s in last.values() if s.outcome is not None and jobs[s.job].status == JobStatus.RUNNING]
    return BatchState(
        batch=batch,
        jobs=jobs,
        open=[segment for segment in segments if segment.outcome is None],
        undecided=undecided,
        past=[s for s in segments if s.outcome is not None and s not in undecided and jobs[s.job].status not in ENDED],
        struck_out=_struck_out(segment for segment in segments if segment not in undecided),
        missing_events=_missing_events(database, batch, jobs, segments, undecided=undecided),
    )


def speeds_of(
    message_store: MessageStore, records: Sequence[SegmentRecord], profiles: Sequence[Profile]
) -> list[RunningSegment]:
    """Returns the segments of a job for which its gangs reported the time of a step, with that time.

    profiles: the options that the job has now.
    """

    def as_running(record: SegmentRecord) -> RunningSegment:
        segment = segment_of(record, profiles=profiles)
        first_step = record.spec.first_step
        return RunningSegment(segment, profiles[segment.option], (), first_step, first_steps=record.members)

    result = {record.id: as_running(record) for record in records if is_known(record, profiles=profiles)}
    for event in message_store.events(after=0, segments=list(result)):
        if is_about(event.content, result[event.segment].segment.job):
            result[event.segment].handle_event(event.content)
    return [running for running in result.values() if running.step_s is not None]


def nodes_of(records: Iterable[SegmentRecord]) -> dict[str, Node]:
    """Returns the nodes on which segments were started, as far as the names of their leases describe them."""
    gpus: dict[str, dict[int, bool]] = defaultdict(dict)  # by node and number
    for name in (name for record in records for name in record.spec.devices):
        node, kind, number = name.rsplit(":", 2)
        gpus[node][int(number)] = kind == "gpu"

    def device(is_gpu: bool, number: int) -> Device:
        return Device(kind="gpu" if is_gpu else "cpu", index=number, name="", memory_bytes=0, cores=())

    return {
        node: Node(name=node, devices=tuple(device(known.get(i, False), i) for i in range(max(known) + 1)))
        for node, known in gpus.items()
    }


def _struck_out(segments: Iterable[SegmentRecord]) -> dict[str, frozenset[OptionKey]]:
    result: dict[str, frozenset[OptionKey]] = defaultdict(frozenset)
    for segment in segments:
        if segment.result.status == OutcomeStatus.OUT_OF_MEMORY:
            result[segment.job] |= {option_key_of(segment)}
    return result


def _missing_events(
    database: Database,
    batch: Submission,
    jobs: Mapping[str, JobRecord],
    segments: Sequence[SegmentRecord],
    *,
    undecided: Sequence[SegmentRecord],
) -> list[ExecutionEvent]:
    """Returns the events that follow from the journal and are not logged, except those that await a decision."""
    started, ended = map(BatchEvents(database, batch.id).segments, (SegmentStarted, SegmentEnded))
    missing_events: list[ExecutionEvent] = []
    pending = {segment.id for segment in undecided}
    for segment in segments:
        members = tuple(segment.members)
        planned = segment_of(segment, profiles=batch.profiles.get(segment.job, ()))
        if segment.id not in started:
            start = SegmentStarted(
                number=segment.id,
                segment=planned,
                technique=segment.spec.technique,
                num_devices=segment.spec.num_devices,
                first_step=segment.spec.first_step,
                attempt=1,
                members=members,
            )
            missing_events.append(start)
        if segment.outcome is not None and segment.id not in ended | pending:
            decision, outcome = "reported by the executor that took over", Outcome.of(segment.result)
            missing_events.append(
                SegmentEnded(number=segment.id, segment=planned, outcome=outcome, decision=decision, members=members)
            )
    job, status = (json_field(EVENT_LOG.c.content, key) for key in ("job", "status"))
    query = select(job, status).where(EVENT_LOG.c.batch == batch.id, EVENT_LOG.c.kind == JobEnded.__name__)
    reported = {row[0]: row[1] for row in database.rows(query.order_by(EVENT_LOG.c.id))}  # the last ends
    for name, record in jobs.items():
        if record.status in ENDED and batch.profiles.get(name) and reported.get(name) != record.status:
            missing_events.append(JobEnded(record=record))
    return missing_events
