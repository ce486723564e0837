"""The dispatch rules: which segments of a plan may start now. Pure functions without clock and I/O.

The executor reads a plan as an order, not as a timetable. A segment starts when its devices are free and the jobs that
it depends on are done, however early or late that is. It never starts before a segment that the plan orders before it
on one of its devices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ringmaster.tasks.planning import Plan

DeviceId = tuple[str, int]
"""The name of a node, and the number of a device on it."""

Command = tuple[int, str]
"""The number of a segment, and the command to send to its gang."""


def device_of(lease: str) -> DeviceId:
    """Returns the device of a lease name "node:kind:number". The device need not exist any more."""
    node, _, number = lease.rsplit(":", 2)
    return node, int(number)


@dataclass(frozen=True, kw_only=True)
class PlannedSegment:
    """A range of a job's steps up to `last_step` (exclusive), on `devices` under its option number `option`."""

    job: str
    option: int
    last_step: int
    devices: tuple[DeviceId, ...]
    start_s: float
    end_s: float


def in_steps(plan: Plan, *, num_steps: Mapping[str, int], steps_done: Mapping[str, int]) -> list[PlannedSegment]:
    """Returns the plan's segments in order of their start, with each job's shares of work rounded to whole steps.

    A segment that rounds to no step is omitted, unless it is the only one of its job (only an evaluation is left).

    num_steps: the last step of each job.
    steps_done: the steps that each job has done; the plan covers the steps from there to `num_steps`.
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
    after: Mapping[str, Collection[str]],
    beside: Collection[str] = (),
    num_devices: float = math.inf,
) -> list[PlannedSegment]:
    """Returns the segments of `planned` that may start now, in their order.

    planned: the segments that have not started yet, in order.
    after: the jobs that each job depends on, if any.
    beside: further jobs that running gangs train.
    num_devices: the number of devices that there are, if it is known: nothing starts once all of them are busy.
    """
    busy = {device for segment in running for device in segment.devices}
    active_jobs = {*(segment.job for segment in running), *beside}
    result = []
    for segment in planned:
        if len(busy) >= num_devices:
            break
        is_free = busy.isdisjoint(segment.devices) and segment.job not in active_jobs
        if is_free and all(other in done_jobs for other in after.get(segment.job, ())):
            result.append(segment)
        # Whether it starts or waits, it precedes later segments of its job and on its devices.
        busy.update(segment.devices)
        active_jobs.add(segment.job)
    return result


def end_of(
    segment: PlannedSegment,
    planned: Sequence[PlannedSegment],
    *,
    running: Iterable[PlannedSegment],
    done_jobs: Collection[str],
    after: Mapping[str, Collection[str]],
    over: Collection[str] = (),
) -> PlannedSegment | Literal["ends", "goes on"]:
    """Decides what happens when a running segment reaches its planned last step.

    The segment "ends" if its job's next segment or another segment on its devices could start once it has ended. If the
    next segment has the same gang, it is returned: the gang continues with it without interruption. Else the segment
    "goes on", as no ready segment waits for its devices.

    over: the jobs that already run beyond their planned end. They count as ended too: a segment that waits for the
        devices of several such gangs would otherwise wait for each of them in turn, without end.
    """
    others = [other for other in running if other.job != segment.job and other.job not in over]
    heirs = startable(planned, running=others, done_jobs=done_jobs, after=after)
    following = next((heir for heir in heirs if heir.job == segment.job), None)
    if following is not None:
        return following if is_same_gang(following, segment) else "ends"
    is_awaited = any(not set(heir.devices).isdisjoint(segment.devices) for heir in heirs)
    return "ends" if is_awaited else "goes on"


def is_same_gang(a: PlannedSegment, b: PlannedSegment) -> bool:
    """Whether two segments have the same job, option and devices."""
    return (a.job, a.option, set(a.devices)) == (b.job, b.option, set(b.devices))


@dataclass(frozen=True, kw_only=True)
class Handover:
    """The changes to running segments that a new plan requires.

    stays: the new last step of each running job that continues unchanged.
    stops: the running jobs that must checkpoint and end.
    planned: the segments that are still to be started.
    """

    stays: Mapping[str, int]
    stops: frozenset[str]
    planned: tuple[PlannedSegment, ...]


def hand_over(planned: Sequence[PlannedSegment], *, running: Iterable[PlannedSegment]) -> Handover:
    """Fits a new plan to the running segments.

    A gang continues if the new plan begins with the same gang on its devices.
    """
    active = {segment.job: segment for segment in running}
    taken: set[DeviceId] = set()
    seen: set[str] = set()
    stays: dict[str, int] = {}
    left = []
    for segment in planned:
        is_first = segment.job not in seen and taken.isdisjoint(segment.devices)
        if is_first and segment.job in active and is_same_gang(segment, active[segment.job]):
            stays[segment.job] = segment.last_step
        else:
            left.append(segment)
        seen.add(segment.job)
        taken.update(segment.devices)
    return Handover(stays=stays, stops=frozenset(active) - frozenset(stays), planned=tuple(left))
