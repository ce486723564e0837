"""The dispatch rules: which segments of a plan may start now. Pure: no clock, no I/O.

A plan is read as an order, not as a timetable: a segment starts when its devices are free and what it waits for is
done, however early or late that is, and never before a segment that the plan has put before it on one of its devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasks.planning import Plan

DeviceId = tuple[str, int]
"""Node name, and the number of the device on it."""


@dataclass(frozen=True, kw_only=True)
class PlannedSegment:
    """A stretch of a job's steps, up to `last_step` (exclusive), on `devices` under its option number `option`."""

    job: str
    option: int
    last_step: int
    devices: tuple[DeviceId, ...]
    start_s: float
    end_s: float


def in_steps(plan: Plan, *, num_steps: Mapping[str, int], steps_done: Mapping[str, int]) -> list[PlannedSegment]:
    """The plan's segments in order of their start, each job's shares of work rounded to whole steps.

    num_steps, steps_done: by job; the plan is about the steps in between. A segment that rounds to no step is left
    out, but for one that stands alone (only an evaluation is left).
    """
    planned: list[PlannedSegment] = []
    for job in dict.fromkeys(segment.job for segment in plan.segments):
        done = first = steps_done.get(job, 0)
        share, segments = 0.0, plan.segments_of(job)
        for i, segment in enumerate(segments):
            share += segment.work
            is_last = i == len(segments) - 1
            last = num_steps[job] if is_last else first + round(share * (num_steps[job] - first))
            is_alone = is_last and not any(other.job == job for other in planned)
            if last > done or is_alone:
                planned.append(
                    PlannedSegment(
                        job=job,
                        option=segment.option,
                        last_step=last,
                        devices=tuple((node, device) for node, devices in segment.devices for device in devices),
                        start_s=segment.start_s,
                        end_s=segment.end_s,
                    )
                )
                done = last
    return sorted(planned, key=lambda segment: (segment.start_s, segment.end_s, segment.job))


def startable(
    planned: Sequence[PlannedSegment],
    *,
    running: Iterable[PlannedSegment],
    done_jobs: Collection[str],
    bases: Mapping[str, str],
) -> list[PlannedSegment]:
    """The segments of `planned` (those not started yet, in order) that may start now, the first one first.

    bases: the job that each waits for, where there is one.
    """
    busy = {device for segment in running for device in segment.devices}
    active_jobs = {segment.job for segment in running}
    result = []
    for segment in planned:
        base = bases.get(segment.job)
        is_free = busy.isdisjoint(segment.devices) and segment.job not in active_jobs
        if is_free and (base is None or base in done_jobs):
            result.append(segment)
        # Whether it starts or waits, later segments of its job or on its devices come after it.
        busy.update(segment.devices)
        active_jobs.add(segment.job)
    return result
