"""The forecast of a plan that is being followed: its remaining segments, each starting when its devices are free.

The executor reads a plan as an order, not as a timetable, and so does the forecast. Each device serves its segments in
the plan's order, each for its planned duration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.planning import Plan, Problem, Segment
from ringmaster.tasks.timeline.run_timeline import NOW_RUNNING, TO_COME, Span
from ringmaster.techniques.processes.events import OutcomeStatus

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


def as_span(segment: Segment, problem: Problem, *, from_s: float, status: str) -> Span:
    """Returns a planned segment as a span.

    from_s: when its plan was made.
    """
    row = problem.job(segment.job)
    return Span(
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


def planned_end_s(standing: FollowedPlan, running: Span) -> float | None:
    """Returns when a running segment ends by the plan, None if the plan does not contain it."""
    mine = standing.plan.segments_of(running.job)
    same = next((segment for segment in mine if _is_gang(segment, running, standing.problem)), None)
    if same is None:
        return None
    # A plan that is newer than the segment begins with it; an older one gives only its duration.
    is_newer = standing.made_s > running.start_s and same is mine[0]
    return (standing.made_s + same.end_s) if is_newer else running.start_s + same.duration_s


def to_come(
    standing: Mapping[str, FollowedPlan], *, past: Sequence[Span], running: Sequence[Span], now_s: float
) -> list[Span]:
    """Returns the segments that are still to be started, at their forecast times, from `now_s` on.

    standing: the plan that each unfinished job follows.
    past: the spans that have ended.
    running: the spans that run, with their forecast ends.
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


def _num_begun(segments: Sequence[Segment], spans: Sequence[Span], standing: FollowedPlan) -> int:
    """Returns how many of a job's planned segments have begun.

    spans: the job's past and running spans, in order.
    """
    begun = 0
    for span in spans:
        is_running = span.status == NOW_RUNNING
        if span.start_s < standing.made_s:
            # It began before the plan was made. It belongs to the plan only if it still runs as the first segment.
            if is_running and segments and _is_gang(segments[0], span, standing.problem):
                begun = 1
            continue
        at = next((i for i in range(begun, len(segments)) if _is_gang(segments[i], span, standing.problem)), None)
        if at is not None:
            begun = at if span.status in AGAIN else at + 1
    if (
        begun == 0
        and spans
        and spans[-1].status == OutcomeStatus.DONE
        and spans[-1].start_s < standing.made_s < spans[-1].end_s
    ):
        # It ran on as the first segment of the plan, and has ended since.
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
