"""The dispatch rules: which segments of a plan may start now. Pure: no clock, no I/O.

A plan is read as an order, not as a timetable: a segment starts when its devices are free and what it waits for is
done, however early or late that is, and never before a segment that the plan has put before it on one of its devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ringmaster.tasks.planning import Plan

DeviceId = tuple[str, int]
"""Node name, and the number of the device on it."""


def device_of(lease: str) -> DeviceId:
    """The device that leases call so, whether it is still there or not."""
    node, _, number = lease.rsplit(":", 2)
    return node, int(number)


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
    after: Mapping[str, Collection[str]],
    beside: Collection[str] = (),
) -> list[PlannedSegment]:
    """The segments of `planned` (those not started yet, in order) that may start now, the first one first.

    after: the jobs that each job waits for, where there are any. beside: further jobs that running gangs train.
    """
    busy = {device for segment in running for device in segment.devices}
    active_jobs = {*(segment.job for segment in running), *beside}
    result = []
    for segment in planned:
        is_free = busy.isdisjoint(segment.devices) and segment.job not in active_jobs
        if is_free and all(other in done_jobs for other in after.get(segment.job, ())):
            result.append(segment)
        # Whether it starts or waits, later segments of its job or on its devices come after it.
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
    """What becomes of a running segment at its last step, which is a proposal.

    It ends where, with it gone, its job's next segment could start, or another one on its devices; where that next
    segment is of the same gang, it goes straight on with it (which is returned). Else it goes on: nobody is waiting.

    over: the jobs that go on beyond their end already. They count as gone too: what waits for the devices of several
    such gangs would else wait for each of them in turn, and for ever.
    """
    others = [other for other in running if other.job != segment.job and other.job not in over]
    heirs = startable(planned, running=others, done_jobs=done_jobs, after=after)
    following = next((heir for heir in heirs if heir.job == segment.job), None)
    if following is not None:
        return following if is_same_gang(following, segment) else "ends"
    is_awaited = any(not set(heir.devices).isdisjoint(segment.devices) for heir in heirs)
    return "ends" if is_awaited else "goes on"


def is_same_gang(a: PlannedSegment, b: PlannedSegment) -> bool:
    """Whether two segments are of one job, under one option and on the same devices."""
    return (a.job, a.option, set(a.devices)) == (b.job, b.option, set(b.devices))


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What a new plan asks of the segments that run.

    stays: the new last step of each running job that goes on as it is; stops: the running jobs that must checkpoint and
    end; planned: what is left to be started.
    """

    stays: Mapping[str, int]
    stops: frozenset[str]
    planned: tuple[PlannedSegment, ...]


def hand_over(planned: Sequence[PlannedSegment], *, running: Iterable[PlannedSegment]) -> Handover:
    """Fits a new plan to what runs: a gang goes on where the plan begins with that very gang on its devices."""
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
