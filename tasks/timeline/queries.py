"""The database's rows behind a timeline, and the forecast of a plan that is being followed.

The executor reads a plan as an order, not as a timetable, and so does the forecast. Each device serves its segments in
the plan's order, each for its planned duration, and a segment starts when its devices are free.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Select, func, or_, select

from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.execution_events import Prediction, predictions_in
from ringmaster.tasks.planning import Plan, Problem, Segment
from ringmaster.tasks.pool.submissions import BatchStatus
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import BATCH, NEWEST_PREDICTION
from ringmaster.tasks.storage.journal import ENDED, Journal, SegmentRecord, segment_record
from ringmaster.tasks.storage.schema import BATCHES, FACTS, GANG_EVENTS, JOBS, NODES, PLANS, SEGMENTS
from ringmaster.tasks.timeline.run_timeline import NOW_RUNNING, TO_COME, TimelineSpan
from ringmaster.techniques.processes.gang_events import Event, OutcomeStatus, event_or_refusal


@dataclass(frozen=True)
class PlanHeader:
    """A plan in the database: when and why it was made."""

    id: int
    made_s: float
    why: str


class Archive:
    """Reads a batch that runs alone, or a whole pool, whose jobs are named "BATCH/JOB". Times are since the epoch.

    clock: returns the current time; None for the clock that is recorded in the database.
    """

    def __init__(self, database: Database, *, is_pool: bool, clock: Callable[[], float] | None = None) -> None:
        self.database, self.is_pool = database, is_pool
        self.journal = Journal(database, batch=None if is_pool else "", clock=clock)

    def clock(self) -> float:
        """Returns the current time, which is comparable with those in the database."""
        return self.journal.clock()

    def signature(self) -> tuple[str, ...]:
        """Returns a value that changes whenever something has happened."""
        queries: list[Select[Any]] = [
            select(func.max(PLANS.c.id)),
            select(func.count(SEGMENTS.c.id), func.count(SEGMENTS.c.ended_s)),
            select(JOBS.c.status, func.count(), func.sum(JOBS.c.step)).group_by(JOBS.c.status).order_by(JOBS.c.status),
            select(BATCHES.c.id, BATCHES.c.status).order_by(BATCHES.c.id),
            select(func.max(GANG_EVENTS.c.id)),
            select(NODES.c.name, NODES.c.incarnation, NODES.c.status, NODES.c.health).order_by(NODES.c.name),
        ]
        rows = self.database.read(lambda connection: [connection.execute(query).all() for query in queries])
        return tuple(str(row) for row in rows)

    def num_left(self, batch: str | None) -> int:
        """Returns how many jobs have not ended, of all or of one batch of a pool."""
        query = select(func.count()).where(JOBS.c.status.not_in(ENDED))
        number: int = self.database.rows(query if batch is None else query.where(JOBS.c.batch == batch))[0][0]
        return number

    def predictions(self, batches: Collection[str]) -> dict[str, Prediction]:
        """Returns the newest prediction for each of some batches."""
        query = select(FACTS.c.batch, FACTS.c.value).where(FACTS.c.batch.in_(batches), FACTS.c.key == NEWEST_PREDICTION)
        result = {row.batch: predictions_in({NEWEST_PREDICTION: row.value[0]})[1] for row in self.database.rows(query)}
        return {batch: prediction for batch, prediction in result.items() if prediction is not None}

    def window(self, batch: str | None) -> tuple[float, Collection[str]]:
        """Returns the batches of a pool to show, and the time from which on.

        Shows the unfinished batches and `batch`, or the newest batch if there are none, and every batch submitted since
        then.
        """
        rows = self.database.rows(select(BATCHES.c.id, BATCHES.c.submitted_s, BATCHES.c.status))
        shown = [row for row in rows if row.status == BatchStatus.SUBMITTED or row.id == batch]
        shown = shown or sorted(rows, key=lambda row: row.submitted_s)[-1:]
        since_s = min((row.submitted_s for row in shown), default=self.clock())
        return since_s, {row.id for row in rows if row.submitted_s >= since_s}

    def heads(self, *, since_s: float) -> list[PlanHeader]:
        """Returns the plans that were made since `since_s`, or else the newest one."""
        query = select(PLANS.c.id, PLANS.c.made_s, PLANS.c.why).where(PLANS.c.batch == "").order_by(PLANS.c.id)
        rows = self.database.rows(query.where(PLANS.c.made_s >= since_s))
        newest = query.order_by(None).order_by(PLANS.c.id.desc()).limit(1)
        return [PlanHeader(row.id, row.made_s, row.why) for row in rows or self.database.rows(newest)]

    def plan(self, number: int) -> tuple[Plan, Problem]:
        """Returns a plan with its problem."""
        content = self.database.rows(select(PLANS.c.content).where(PLANS.c.id == number))[0].content
        return Plan.from_json(content["plan"]), Problem.from_json(content["problem"])

    def segments(self, batches: Collection[str], *, since_s: float) -> list[SegmentRecord]:
        """Returns the segments of some batches that run or have ended since `since_s`."""
        query = select(SEGMENTS).where(SEGMENTS.c.batch.in_(batches)).order_by(SEGMENTS.c.id)
        rows = self.database.rows(query.where(or_(SEGMENTS.c.ended_s.is_(None), SEGMENTS.c.ended_s >= since_s)))
        return [segment_record(row._mapping, job=self._name(row.batch, row.job)) for row in rows]

    def totals(self, batches: Collection[str]) -> dict[str, int | None]:
        """Returns the number of steps of each job, None if it is not recorded."""
        if not self.is_pool:
            return {job["name"]: job.get("num_steps") for job in self.journal.get(BATCH, {}).get("jobs", ())}
        rows = self.database.rows(select(BATCHES.c.id, BATCHES.c.content).where(BATCHES.c.id.in_(batches)))
        return {f"{row.id}/{job['name']}": job["num_steps"] for row in rows for job in row.content["jobs"]}

    def gang_events(self, segments: Collection[int], *, after: int, most: int) -> tuple[int, list[tuple[int, Event]]]:
        """Returns the events of the gangs of some segments after the event number `after`, among the newest `most`
        events.

        The result begins with the number of the newest event.
        """
        newest: int = self.database.rows(select(func.max(GANG_EVENTS.c.id)))[0][0] or 0
        after = max(after, newest - most)
        if not segments or newest <= after:
            return newest, []
        query = select(GANG_EVENTS.c.segment, GANG_EVENTS.c.content).where(
            GANG_EVENTS.c.id > after, GANG_EVENTS.c.segment.in_(segments)
        )
        return newest, [
            (row.segment, event_or_refusal(row.content)) for row in self.database.rows(query.order_by(GANG_EVENTS.c.id))
        ]

    def _name(self, batch: str, job: str) -> str:
        return f"{batch}/{job}" if self.is_pool else job


AGAIN = (
    OutcomeStatus.CRASHED,
    OutcomeStatus.PREEMPTED,
    OutcomeStatus.LOST,
)  # outcomes after which a segment is repeated


@dataclass(frozen=True, kw_only=True)
class FollowedPlan:
    """The plan that is followed.

    made_s: when it was made, in seconds of the timeline. The plan's own seconds count from then.
    """

    plan: Plan
    problem: Problem
    made_s: float


def as_span(segment: Segment, problem: Problem, *, from_s: float, status: str) -> TimelineSpan:
    """Returns a planned segment as a span.

    from_s: when its plan was made.
    """
    row = problem.job(segment.job)
    return TimelineSpan(
        job=segment.job,
        technique=row.options[segment.option].technique,
        members=(*row.members, *row.options[segment.option].jobs),
        devices=devices_of(segment),
        start_s=from_s + segment.start_s,
        end_s=from_s + segment.end_s,
        status=status,
    )


def devices_of(segment: Segment) -> tuple[DeviceId, ...]:
    """Returns the devices of a planned segment."""
    return tuple((node, device) for node, ids in segment.devices for device in ids)


def planned_end_s(followed: FollowedPlan, running: TimelineSpan) -> float | None:
    """Returns when a running segment ends by the plan, None if the plan does not contain it."""
    own = followed.plan.segments_of(running.job)
    same = next((segment for segment in own if _is_gang(segment, running, followed.problem)), None)
    if same is None:
        return None
    # A plan that is newer than the segment begins with it; an older one gives only its duration.
    is_newer = followed.made_s > running.start_s and same is own[0]
    return (followed.made_s + same.end_s) if is_newer else running.start_s + same.duration_s


def to_come(
    followed: Mapping[str, FollowedPlan], *, past: Sequence[TimelineSpan], running: Sequence[TimelineSpan], now_s: float
) -> list[TimelineSpan]:
    """Returns the segments that are still to be started, at their forecast times, from `now_s` on.

    followed: the plan that each unfinished job follows.
    past: the spans that have ended.
    running: the spans that run, with their forecast ends.
    """
    own: dict[str, list[TimelineSpan]] = {}
    for span in sorted((*past, *running), key=lambda span: span.start_s):
        own.setdefault(span.job, []).append(span)
    rest: list[TimelineSpan] = []
    after: dict[str, Sequence[str]] = {}
    for job, plan in followed.items():
        segments = plan.plan.segments_of(job)
        left = segments[_num_begun(segments, own.get(job, []), plan) :]
        rest += [as_span(segment, plan.problem, from_s=plan.made_s, status=TO_COME) for segment in left]
        after[job] = plan.problem.job(job).after
    return _in_order(rest, after, running=running, now_s=now_s)


def _num_begun(segments: Sequence[Segment], spans: Sequence[TimelineSpan], followed: FollowedPlan) -> int:
    """Returns how many of a job's planned segments have begun.

    spans: the job's past and running spans, in order.
    """
    begun = 0
    for span in spans:
        is_running = span.status == NOW_RUNNING
        if span.start_s < followed.made_s:
            # It began before the plan was made. It belongs to the plan only if it still runs as the first segment.
            if is_running and segments and _is_gang(segments[0], span, followed.problem):
                begun = 1
            continue
        at = next((i for i in range(begun, len(segments)) if _is_gang(segments[i], span, followed.problem)), None)
        if at is not None:
            begun = at if span.status in AGAIN else at + 1
    if (
        begun == 0
        and spans
        and spans[-1].status == OutcomeStatus.DONE
        and spans[-1].start_s < followed.made_s < spans[-1].end_s
    ):
        # It ran on as the first segment of the plan, and has ended since.
        begun = int(bool(segments) and _is_gang(segments[0], spans[-1], followed.problem))
    return begun


def _is_gang(segment: Segment, span: TimelineSpan, problem: Problem) -> bool:
    technique = problem.job(segment.job).options[segment.option].technique
    return technique == span.technique and set(devices_of(segment)) == set(span.devices)


def _in_order(
    planned: Sequence[TimelineSpan],
    after: Mapping[str, Sequence[str]],
    *,
    running: Sequence[TimelineSpan],
    now_s: float,
) -> list[TimelineSpan]:
    free_s: dict[DeviceId, float] = {device: span.end_s for span in running for device in span.devices}
    ended_s: dict[str, float] = {span.job: span.end_s for span in running}
    result = []
    for span in sorted(planned, key=lambda span: (span.start_s, span.end_s, span.job)):
        waits_for = [ended_s.get(job, -math.inf) for job in (span.job, *after[span.job])]
        start_s = max(now_s, *waits_for, *(free_s.get(device, -math.inf) for device in span.devices))
        end_s = start_s + span.end_s - span.start_s
        ended_s[span.job] = end_s
        free_s |= dict.fromkeys(span.devices, end_s)
        result.append(replace(span, start_s=start_s, end_s=end_s))
    return result
