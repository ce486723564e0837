"""What comes by a plan that is followed already: its segments that are left, begun when their devices are free.

The executor reads plans as orders, not as timetables, and so does this: each device serves its segments in the plan's
order, each for as long as it was planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ringmaster.tasks.execution.chronicle import NOW_RUNNING, TO_COME, Span
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.orders import CANCELLED, LOST
from ringmaster.tasks.planning import Plan, Problem, Segment
from ringmaster.techniques.engine.gang import CRASHED, DONE, PREEMPTED

AGAIN = (CRASHED, PREEMPTED, LOST, CANCELLED)  # outcomes after which a segment comes again


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The plan that is followed. made_s: when it was made, in seconds of the chronicle; its own seconds count from
    then."""

    plan: Plan
    problem: Problem
    made_s: float


def as_span(segment: Segment, problem: Problem, *, from_s: float, status: str) -> Span:
    """A planned segment. from_s: when its plan was made."""
    row = problem.job(segment.job)
    return Span(
        job=segment.job,
        technique=row.options[segment.option].technique,
        fellows=(*row.fellows, *row.options[segment.option].jobs),
        devices=devices_of(segment),
        start_s=from_s + segment.start_s,
        end_s=from_s + segment.end_s,
        status=status,
    )


def devices_of(segment: Segment) -> tuple[DeviceId, ...]:
    """The devices of a planned segment, one by one."""
    return tuple((node, device) for node, ids in segment.devices for device in ids)


def planned_end_s(standing: Standing, running: Span) -> float | None:
    """When a running segment ends by the plan; None where the plan knows nothing of it."""
    mine = standing.plan.segments_of(running.job)
    same = next((segment for segment in mine if _is_gang(segment, running, standing.problem)), None)
    if same is None:
        return None
    # A plan that is newer than the segment goes on with it at once; an older one only knew how long it would take.
    is_newer = standing.made_s > running.start_s and same is mine[0]
    return (standing.made_s + same.end_s) if is_newer else running.start_s + same.duration_s


def to_come(
    standing: Mapping[str, Standing], *, past: Sequence[Span], running: Sequence[Span], now_s: float
) -> list[Span]:
    """The segments that are still to be started, at their forecast times, which begin at `now_s`.

    standing: by job that goes on, the plan that it follows. past, running: the spans that have ended and those that
    run, with their forecast ends.
    """
    mine: dict[str, list[Span]] = {}
    for span in sorted((*past, *running), key=lambda span: span.start_s):
        mine.setdefault(span.job, []).append(span)
    rest: list[Span] = []
    after: dict[str, Sequence[str]] = {}
    for job, plan in standing.items():
        segments = plan.plan.segments_of(job)
        left = segments[_num_begun(segments, mine.get(job, []), plan) :]
        rest += [as_span(segment, plan.problem, from_s=plan.made_s, status=TO_COME) for segment in left]
        after[job] = plan.problem.job(job).after
    return _in_order(rest, after, running=running, now_s=now_s)


def _num_begun(segments: Sequence[Segment], spans: Sequence[Span], standing: Standing) -> int:
    """How many of a job's planned segments have begun already. spans: the job's, in order."""
    begun = 0
    for span in spans:
        is_running = span.status == NOW_RUNNING
        if span.start_s < standing.made_s:
            # Of the time before the plan: what still runs may go on as the plan begins; the rest is no part of it.
            if is_running and segments and _is_gang(segments[0], span, standing.problem):
                begun = 1
            continue
        at = next((i for i in range(begun, len(segments)) if _is_gang(segments[i], span, standing.problem)), None)
        if at is not None:
            begun = at if span.status in AGAIN else at + 1
    if begun == 0 and spans and spans[-1].status == DONE and spans[-1].start_s < standing.made_s < spans[-1].end_s:
        # It went on as the plan begins, and has come to its end since.
        begun = int(bool(segments) and _is_gang(segments[0], spans[-1], standing.problem))
    return begun


def _is_gang(segment: Segment, span: Span, problem: Problem) -> bool:
    technique = problem.job(segment.job).options[segment.option].technique
    return technique == span.technique and set(devices_of(segment)) == set(span.devices)


def _in_order(
    planned: Sequence[Span], after: Mapping[str, Sequence[str]], *, running: Sequence[Span], now_s: float
) -> list[Span]:
    free_s: dict[DeviceId, float] = {device: span.end_s for span in running for device in span.devices}
    ended_s: dict[str, float] = {span.job: span.end_s for span in running}
    found = []
    for span in sorted(planned, key=lambda span: (span.start_s, span.end_s, span.job)):
        waits_for = [ended_s.get(job, -math.inf) for job in (span.job, *after[span.job])]
        start_s = max(now_s, *waits_for, *(free_s.get(device, -math.inf) for device in span.devices))
        end_s = start_s + span.end_s - span.start_s
        ended_s[span.job] = end_s
        free_s |= dict.fromkeys(span.devices, end_s)
        found.append(replace(span, start_s=start_s, end_s=end_s))
    return found
