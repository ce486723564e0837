"""The event log: the stored decisions of a pool's controller about its batches, and their plans.

The events of gangs are in the message store. `BatchEvents` reads both, and returns the events of a batch in one order.

The executor writes its decisions into the event log; the nodes write the events of their gangs into the message store.
Followers read both tables, so that no event is stored twice. The order between the two follows from two rules:

- The events of a gang come after the start of its segment.
- A decision comes after the events that it follows from. These have lower numbers than any event that is stored after
  the decision, so a reader that reads the decisions first, and then all events of gangs, has read them.

An event that arrives after the end of its segment is dropped, as the executor has not heard it either: its node was
taken for lost.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from sqlalchemy import Connection, Integer, cast, func, insert, select

from ringmaster.codec import from_json, stored_as, to_json
from ringmaster.tasks.execution.execution_events import (
    DeviceWait,
    ExecutionEvent,
    GangReport,
    JobEnded,
    PlanUpdate,
    SegmentEnded,
    SegmentStarted,
)
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import details_of, job_record
from ringmaster.tasks.storage.schema import EVENT_LOG, GANG_EVENTS, SEGMENTS, json_field
from ringmaster.techniques.processes.gang_events import (
    DeviceTelemetry,
    EvaluationReported,
    Event,
    JobEvent,
    JobOfGroupEnded,
    Outcome,
    RefusedEvent,
    Steps,
    event_from_json,
    event_or_refusal,
)

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
MAX_AT_ONCE = 1000
MAX_RECENT = 2000  # rows of each table to hold in memory for the readers of a batch
FOR_THE_EXECUTOR = (JobOfGroupEnded, RefusedEvent, Outcome)  # events that reach followers as the decisions on them


# Rows have the names that these classes had in release 0.2.
_FORMER_NAMES = {PlanUpdate: "Planned", GangReport: "GangSaid", DeviceWait: "Waiting"}
_KINDS: Mapping[str, Any] = {_FORMER_NAMES.get(cls, cls.__name__): cls for cls in get_args(ExecutionEvent)}


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """The start or the end of a segment, with its number in the log and its batch."""

    id: int
    batch: str
    event: SegmentStarted | SegmentEnded


class EventLog:
    """The events of a pool's batches, in order."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, batch: str, event: ExecutionEvent) -> None:
        """Stores an event of a batch. The event names jobs by their names within the batch."""
        self._database.insert_later(EVENT_LOG, **_row(batch, event))

    def segment_events(self, *, after: int) -> list[PoolEntry]:
        """Returns the starts and ends of the segments of all batches after the event with that number, in order."""
        kinds = (SegmentStarted.__name__, SegmentEnded.__name__)
        query = select(EVENT_LOG).where(EVENT_LOG.c.id > after, EVENT_LOG.c.kind.in_(kinds))
        rows = self._database.rows(query.order_by(EVENT_LOG.c.id).limit(MAX_AT_ONCE))
        return [
            PoolEntry(id=row.id, batch=row.batch, event=event)
            for row in rows
            if isinstance(event := event_of_row(row), (SegmentStarted, SegmentEnded))
        ]

    def newest(self) -> int:
        """Returns the number of the last event of all batches, 0 if there is none."""
        return self._database.scalar(select(func.max(EVENT_LOG.c.id))) or 0


def keep(connection: Connection, batch: str, event: ExecutionEvent) -> None:
    """Stores an event as part of a transaction."""
    connection.execute(insert(EVENT_LOG).values(**_row(batch, event)))


def _row(batch: str, event: ExecutionEvent) -> dict[str, Any]:
    return {"batch": batch, "kind": kind_of(event), "content": content_of(event), "told_s": time.time()}


def kind_of(event: ExecutionEvent) -> str:
    """Returns the name under which events of its class are stored."""
    return _FORMER_NAMES.get(type(event), type(event).__name__)


def content_of(event: ExecutionEvent) -> Mapping[str, Any]:
    """Returns an event as JSON values, from which `event_of` reads it."""
    if isinstance(event, PlanUpdate):
        return {"problem": event.problem.to_json(), "plan": event.plan.to_json(), "why": event.why}
    assert not isinstance(event, GangReport), "the events of gangs are in the message store"
    if isinstance(event, JobEnded):
        record = event.record
        details = {**details_of(record), "step": record.step}
        return {"job": record.name, "status": record.status, "message": record.message, "details": details}
    content: Mapping[str, Any] = to_json(event)
    return content


def event_of_row(row: Any) -> ExecutionEvent | None:
    """Returns the event of a row; None, and logs why, for one that cannot be read: damaged, or of another release."""
    try:
        return event_of(row.kind, row.content)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        fault = f"{type(error).__name__}: {error}"
        logger.error("row %d of the event log cannot be read (%s): %s", row.id, row.kind, fault)
        return None


def event_of(kind: str, content: Mapping[str, Any]) -> ExecutionEvent:
    """Returns the event of its kind and `content_of`.

    Rows of earlier releases may have copies of the events of gangs.
    """
    cls: Any = _KINDS[kind]
    if cls is PlanUpdate:
        problem, plan = Problem.from_json(content["problem"]), Plan.from_json(content["plan"])
        return PlanUpdate(problem=problem, plan=plan, why=content["why"])
    if cls is GangReport:
        return GangReport(number=content["number"], job=content["job"], event=event_from_json(content["event"]))
    if cls is JobEnded:
        return JobEnded(record=job_record(content["job"], {"step": content["details"].get("step", 0), **content}))
    event: ExecutionEvent = from_json(cls, content)
    return event


@dataclass(frozen=True, kw_only=True)
class LogPosition:
    """How far a reader has read: the last decision in the event log, and the last event of a gang."""

    decision: int = stored_as("told", default=0)
    gang_event: int = stored_as("said", default=0)


@dataclass(frozen=True, kw_only=True)
class BatchEvent:
    """An event, the position after it, and its time in seconds since the epoch."""

    at: LogPosition
    event: ExecutionEvent
    time_s: float


@dataclass(frozen=True, kw_only=True)
class _Decision:
    id: int
    event: ExecutionEvent | None  # None for a row that cannot be read
    time_s: float


@dataclass(frozen=True, kw_only=True)
class _GangRow:
    id: int
    segment: int
    job: str
    event: Event
    time_s: float


Row = TypeVar("Row", bound="_Decision | _GangRow")


class BatchEvents:
    """The events of a batch for the readers of this process, which reads each row once. Thread-safe."""

    def __init__(self, database: Database, batch: str) -> None:
        self.database, self.batch = database, batch
        self._lock = threading.Lock()
        self._decisions: _RecentRows[_Decision] = _RecentRows(self._read_decisions)
        self._gang_rows: _RecentRows[_GangRow] = _RecentRows(self._read_gang_rows)
        self._copied: dict[int, int] | None = None

    def newest(self) -> LogPosition:
        """Returns the position after all events so far."""
        decision = select(func.max(EVENT_LOG.c.id)).where(EVENT_LOG.c.batch == self.batch).scalar_subquery()
        gang_event = select(func.max(GANG_EVENTS.c.id)).scalar_subquery()
        (row,) = self.database.rows(select(decision, gang_event))
        return LogPosition(decision=row[0] or 0, gang_event=row[1] or 0)

    def follow(self, after: LogPosition, *, until: Callable[[], bool]) -> Iterator[ExecutionEvent]:
        """Yields the events after that position, and new ones until `until` returns True.

        After `until` returns True, the events that are left are yielded before the iterator ends.
        """
        clock, reader = threading.Event(), EventReader(self, after)
        while True:
            is_last = until()  # called before the query, so that events stored up to then are still yielded
            entries = reader.read()
            for entry in entries:
                yield entry.event
            if is_last and not entries:
                return
            if not entries:
                clock.wait(LOOK_EVERY_S)

    def rows(self, after: LogPosition, *, most: int) -> tuple[Sequence[_Decision], Sequence[_GangRow]]:
        """Returns the rows of both tables after that position, at most `most` of each."""

        def read(connection: Connection) -> tuple[Sequence[_Decision], Sequence[_GangRow]]:
            # First the decisions: all events that they follow from are then in the other table.
            decisions = self._decisions.after(connection, after.decision, most=most)
            return decisions, self._gang_rows.after(connection, after.gang_event, most=most)

        with self._lock:
            if self._copied is None:
                self._copied = self.database.read(self._read_copied)
            return self.database.read(read)

    def segments(self, kind: type[ExecutionEvent], *, until: int | None = None) -> set[int]:
        """Returns the segments of the events of that kind, of all or up to a row of the event log."""
        query = select(_number()).where(EVENT_LOG.c.batch == self.batch, EVENT_LOG.c.kind == kind.__name__)
        return set(self.database.scalars(query if until is None else query.where(EVENT_LOG.c.id <= until)))

    def is_copied(self, row: _GangRow) -> bool:
        """Returns whether an event is in the event log too: an earlier release copied the events of gangs there."""
        return row.id <= (self._copied or {}).get(row.segment, 0)

    def _read_copied(self, connection: Connection) -> dict[int, int]:
        """Returns, by segment, the number of the last event that an earlier release copied into the event log."""
        copies = select(_number()).where(EVENT_LOG.c.batch == self.batch, EVENT_LOG.c.kind == _FORMER_NAMES[GangReport])
        result = {}
        for segment, num_copies in Counter(connection.execute(copies).scalars().all()).items():
            query = select(GANG_EVENTS.c.id, GANG_EVENTS.c.content).where(GANG_EVENTS.c.segment == segment)
            rows = connection.execute(query.order_by(GANG_EVENTS.c.id)).all()
            shown = [row.id for row in rows if not isinstance(event_or_refusal(row.content), FOR_THE_EXECUTOR)]
            if shown:
                result[segment] = shown[:num_copies][-1]
        return result

    def _read_decisions(self, connection: Connection, after: int, most: int) -> Sequence[_Decision]:
        query = select(EVENT_LOG).where(EVENT_LOG.c.batch == self.batch, EVENT_LOG.c.id > after)
        rows = connection.execute(query.order_by(EVENT_LOG.c.id).limit(most)).all()
        return [_Decision(id=row.id, event=event_of_row(row), time_s=row.told_s) for row in rows]

    def _read_gang_rows(self, connection: Connection, after: int, most: int) -> Sequence[_GangRow]:
        query = select(GANG_EVENTS, SEGMENTS.c.job, SEGMENTS.c.started_s).where(SEGMENTS.c.batch == self.batch)
        query = query.join(SEGMENTS, SEGMENTS.c.id == GANG_EVENTS.c.segment).where(GANG_EVENTS.c.id > after)
        return [_gang_row(row) for row in connection.execute(query.order_by(GANG_EVENTS.c.id).limit(most)).all()]


class EventReader:
    """Reads the events of a batch in order, from a position on."""

    def __init__(self, events: BatchEvents, after: LogPosition) -> None:
        self._events, self._at = events, after
        self._has_begun = False
        self.num_unreadable = 0  # rows of the event log that were passed over
        self._started: set[int] = set()
        self._ended: set[int] = set()

    def read(self, *, most: int = MAX_AT_ONCE) -> list[BatchEvent]:
        """Returns the next events, none if there are none yet. most: the number of rows to read of each table."""
        if not self._has_begun:
            self._has_begun = True
            self._ended = self._events.segments(SegmentEnded, until=self._at.decision)
            self._started = self._events.segments(SegmentStarted, until=self._at.decision)
        while True:
            before, result = self._at, self._read(most)
            if result or self._at == before:
                return result

    def _read(self, most: int) -> list[BatchEvent]:
        """Returns the events of the next rows, which may all be rows that readers do not see."""
        decisions, value = self._events.rows(self._at, most=most)
        result, number = list[BatchEvent](), 0
        for decision in decisions:
            number += self._take(value[number:], result)
            is_last = number == len(value) == most
            if is_last and isinstance(decision.event, (SegmentEnded, JobEnded)):
                return result  # further events of gangs may come before it
            self._at = LogPosition(decision=decision.id, gang_event=self._at.gang_event)
            if decision.event is None:
                self.num_unreadable += 1
                continue
            if isinstance(decision.event, SegmentStarted):
                self._started.add(decision.event.number)
            elif isinstance(decision.event, SegmentEnded):
                self._ended.add(decision.event.number)
            result.append(BatchEvent(at=self._at, event=decision.event, time_s=decision.time_s))
        self._take(value[number:], result)
        return result

    def _take(self, rows: Sequence[_GangRow], events: list[BatchEvent]) -> int:
        """Adds the events up to the first one of a gang whose segment has not started; returns how many it read."""
        started = self._started
        newest = max(started, default=0)
        for number, each in enumerate(rows):
            if each.segment not in started and each.segment > newest:
                return number
            self._at = LogPosition(decision=self._at.decision, gang_event=each.id)
            # Maintenance has deleted the start of a segment that is older than those that have started since.
            is_late = each.segment in self._ended or each.segment not in started
            if not is_late and not isinstance(each.event, FOR_THE_EXECUTOR) and not self._events.is_copied(each):
                event = GangReport(number=each.segment, job=each.job, event=each.event)
                events.append(BatchEvent(at=self._at, event=event, time_s=each.time_s))
        return len(rows)


class _RecentRows(Generic[Row]):
    """The newest rows of a table that were read: all rows with a number above `_low`, up to `_high`.

    fetch: reads the rows after a number, at most so many.
    """

    def __init__(self, fetch: Callable[[Connection, int, int], Sequence[Row]]) -> None:
        self._fetch = fetch
        self._rows: list[Row] = []
        self._low = self._high = 0

    def after(self, connection: Connection, number: int, *, most: int) -> Sequence[Row]:
        """Returns the rows after a number, at most so many, of which only those that are not here are read."""
        if number < self._low:  # a reader that is far behind
            return self._fetch(connection, number, most)
        if number > self._high:
            self._rows, self._low, self._high = [], number, number
        result = self._rows[bisect_right(self._rows, number, key=lambda row: row.id) :][:most]
        if len(result) < most:
            new = self._fetch(connection, self._high, most - len(result))
            result, self._rows = [*result, *new], [*self._rows, *new]
            self._high = self._rows[-1].id if self._rows else self._high
        if len(self._rows) > MAX_RECENT:
            self._low = self._rows[-MAX_RECENT - 1].id
            self._rows = self._rows[-MAX_RECENT:]
        return result


def _number() -> Any:
    return cast(json_field(EVENT_LOG.c.content, "number"), Integer)


def _gang_row(row: Any) -> _GangRow:
    event = event_or_refusal(row.content)
    named = event.job if isinstance(event, JobEvent) else None
    # Events that have no time of their own are given one that stays the same however often they are read.
    time_s = event.wall_s if isinstance(event, (Steps, EvaluationReported, DeviceTelemetry)) else None
    return _GangRow(id=row.id, segment=row.segment, job=named or row.job, event=event, time_s=time_s or row.started_s)
