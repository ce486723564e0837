"""Counts what happens in a pool, from the rows that are added to its database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection, func, or_, select

from ringmaster.tasks.execution.events import JobEnded
from ringmaster.tasks.pool.metrics.reasons import PlanReason, reason_of
from ringmaster.tasks.storage.schema import PLANS, SEGMENTS, TOLD


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
    status = SEGMENTS.c.outcome["status"].as_string()
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
    status = TOLD.c.content["status"].as_string()
    ended = select(status).where(TOLD.c.id > before.last_event, TOLD.c.kind == JobEnded.__name__)
    newest = connection.execute(select(func.max(TOLD.c.id))).scalar() or 0
    jobs = Counter(before.jobs) + Counter(connection.execute(ended.where(TOLD.c.id <= newest)).scalars().all())
    return replace(before, jobs=jobs, last_event=max(before.last_event, int(newest)))
