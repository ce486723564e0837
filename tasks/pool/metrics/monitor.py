"""Samples a pool periodically: its state, the use of its devices, and the age of its heartbeats.

It counts what happens from the rows that are added to the pool's database.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection, func, or_, select
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.execution.events import JobEnded
from ringmaster.tasks.pool.metrics.reasons import PlanReason, reason_of
from ringmaster.tasks.pool.metrics.state import DeviceStatus, PoolState, StateReader
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import PLANS, SEGMENTS, TOLD, json_field


@dataclass(frozen=True, kw_only=True)
class PoolCounts:
    """What has happened since `begin`.

    plans: the number of plans by reason.
    segments: the number of segments that have ended, by the status of their outcomes.
    jobs: the number of jobs that have ended, by status. A job that is resumed after that may end again.
    last_plan, last_segment, last_event: the newest rows that are counted, or were there before.
    running: the segments that have not ended.
    """

    plans: Mapping[PlanReason, int] = field(default_factory=dict)
    segments: Mapping[str, int] = field(default_factory=dict)
    jobs: Mapping[str, int] = field(default_factory=dict)
    last_plan: int = 0
    last_segment: int = 0
    last_event: int = 0
    running: frozenset[int] = frozenset()


def begin(connection: Connection) -> PoolCounts:
    """Returns counts of zero, to which `count` adds what happens from now on."""
    last_plan, last_segment, last_event = (
        int(connection.execute(select(func.max(table.c.id))).scalar() or 0) for table in (PLANS, SEGMENTS, TOLD)
    )
    running = connection.execute(select(SEGMENTS.c.id).where(SEGMENTS.c.ended_s.is_(None))).scalars().all()
    return PoolCounts(last_plan=last_plan, last_segment=last_segment, last_event=last_event, running=frozenset(running))


def count(connection: Connection, before: PoolCounts) -> PoolCounts:
    """Returns `before` with what has happened since."""
    return _with_jobs(connection, _with_segments(connection, _with_plans(connection, before)))


def _with_plans(connection: Connection, before: PoolCounts) -> PoolCounts:
    query = select(PLANS.c.id, PLANS.c.why).where(PLANS.c.batch == "", PLANS.c.id > before.last_plan)
    rows = connection.execute(query).all()
    plans = Counter(before.plans) + Counter(reason_of(row.why) for row in rows)
    return replace(before, plans=plans, last_plan=max((row.id for row in rows), default=before.last_plan))


def _with_segments(connection: Connection, before: PoolCounts) -> PoolCounts:
    status = json_field(SEGMENTS.c.outcome, "status")
    news = or_(SEGMENTS.c.id > before.last_segment, SEGMENTS.c.id.in_(before.running))
    rows = connection.execute(select(SEGMENTS.c.id, SEGMENTS.c.ended_s, status.label("status")).where(news)).all()
    segments = Counter(before.segments) + Counter(row.status for row in rows if row.ended_s is not None)
    return replace(
        before,
        segments=segments,
        last_segment=max([before.last_segment, *(row.id for row in rows)]),
        running=frozenset(row.id for row in rows if row.ended_s is None),
    )


def _with_jobs(connection: Connection, before: PoolCounts) -> PoolCounts:
    status = json_field(TOLD.c.content, "status")
    ended = select(status).where(TOLD.c.id > before.last_event, TOLD.c.kind == JobEnded.__name__)
    newest = connection.execute(select(func.max(TOLD.c.id))).scalar() or 0
    jobs = Counter(before.jobs) + Counter(connection.execute(ended.where(TOLD.c.id <= newest)).scalars().all())
    return replace(before, jobs=jobs, last_event=max(before.last_event, int(newest)))


logger = logging.getLogger(__name__)

LEADER = ("leader", "")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is known of a pool at one moment.

    state: None while the database does not answer, and before it has answered for the first time.
    device_seconds: by node and state, how long its devices were in that state while both ends of a sample were seen.
    node_heartbeat_age_s: by node, the time since its heartbeat has changed, by the clock of this process.
    leader_heartbeat_age_s: the same of the executor that leads; None if none does.
    """

    state: PoolState | None
    counts: PoolCounts
    device_seconds: Mapping[tuple[str, DeviceStatus], float]
    node_heartbeat_age_s: Mapping[str, float]
    leader_heartbeat_age_s: float | None


class PoolMonitor:
    """Measures a pool. `sample` is called periodically, by one thread; other threads may call `measurement`.

    open_database: opens the pool's database, without waiting where it does not answer.
    clock: monotonic seconds.
    """

    def __init__(self, open_database: Callable[[], Database], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._open, self._clock = open_database, clock
        self._database: Database | None = None
        self._reader = StateReader()
        self._lock = threading.Lock()
        self._state: PoolState | None = None
        self._sampled_s = 0.0
        self._counts: PoolCounts | None = None
        self._is_away = False
        self._device_seconds: dict[tuple[str, DeviceStatus], float] = {}
        self._heartbeats: dict[Hashable, tuple[Hashable, float]] = {}  # the last one, and when it was first seen

    def sample(self) -> None:
        """Reads the database once. Without an answer of the database, the measurement has no state."""
        try:
            self._database = self._database or self._open()
            state, counted = self._database.read(self._read)
        except SQLAlchemyError as error:
            if not self._is_away:
                logger.warning("the pool's database does not answer: %s", getattr(error, "orig", error))
            self._is_away = True
            with self._lock:
                self._state = None
            return
        self._is_away = False
        with self._lock:
            self._take(state, counted)

    def measurement(self) -> Measurement:
        """Returns what the last sample has found. Ages are those of now."""
        with self._lock:
            now_s, state = self._clock(), self._state
            nodes = state.nodes if state is not None else ()
            is_led = state is not None and state.leader is not None and state.leader.is_there
            return Measurement(
                state=state,
                counts=self._counts or PoolCounts(),
                device_seconds=dict(self._device_seconds),
                node_heartbeat_age_s={node.name: now_s - self._heartbeats["node", node.name][1] for node in nodes},
                leader_heartbeat_age_s=now_s - self._heartbeats[LEADER][1] if is_led else None,
            )

    def close(self) -> None:
        """Closes the database."""
        if self._database is not None:
            self._database.close()

    def _read(self, connection: Connection) -> tuple[PoolState, PoolCounts]:
        before = self._counts if self._counts is not None else begin(connection)
        return self._reader.read(connection), count(connection, before)

    def _take(self, state: PoolState, counted: PoolCounts) -> None:
        now_s, before = self._clock(), self._state
        names = {node.name for node in state.nodes}
        # Nodes come and go: series of those that are gone would pile up.
        self._device_seconds = {key: value for key, value in self._device_seconds.items() if key[0] in names}
        for node in state.nodes:
            for each in DeviceStatus:
                self._device_seconds.setdefault((node.name, each), 0.0)
        for node in before.nodes if before is not None else ():
            for each, number in node.devices.items():
                if (node.name, each) in self._device_seconds:
                    self._device_seconds[node.name, each] += number * (now_s - self._sampled_s)
        seen: dict[Hashable, Hashable] = {("node", node.name): node.heartbeat for node in state.nodes}
        if state.leader is not None:
            seen[LEADER] = state.leader.heartbeat
        known = self._heartbeats
        self._heartbeats = {
            who: known[who] if who in known and known[who][0] == beat else (beat, now_s) for who, beat in seen.items()
        }
        self._state, self._counts, self._sampled_s = state, counted, now_s
