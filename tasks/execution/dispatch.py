"""The dispatch rules: which segments of a plan may start now. Pure functions without clock and I/O.

The executor reads a plan as an order, not as a timetable. A segment starts when its devices are free and the jobs that
it depends on are done, however early or late that is. It never starts before a segment that the plan orders before it
on one of its devices. Where what a plan costs depends on the time, a segment that the plan lets wait although its
devices are free does not start before then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ringmaster.codec import SINCE_LATER
from ringmaster.tasks.planning import Plan, Problem, Segment
from ringmaster.tasks.planning.objectives import objective_by_name

DeviceId = tuple[str, int]
"""The name of a node, and the number of a device on it."""

Command = tuple[int, str]
"""The number of a segment, and the command to send to its gang."""

EPS_S = 1e-9
MIN_WAIT_S = 1.0  # of a segment that waits on purpose: shorter gaps of a plan are rounding


def device_of(lease: str) -> DeviceId:
    """Returns the device of a lease name "node:kind:number". The device need not exist any more."""
    node, _, number = lease.rsplit(":", 2)
    return node, int(number)


@dataclass(frozen=True, kw_only=True)
class PlannedSegment:
    """A range of a job's steps up to `last_step` (exclusive), on `devices` under its option number `option`.

    reason: why a job begins it that runs, or has run, under another option or elsewhere.
    is_trial: whether it measures its option, and the rest of the job is decided at its end.
    not_before_s: when it may start at the earliest, by the clock of its dispatcher: the wall clock of an executor, the
        time of a simulator. In between, its job waits.
    """

    job: str
    option: int
    last_step: int
    devices: tuple[DeviceId, ...]
    start_s: float
    end_s: float
    reason: str = ""
    is_trial: bool = False
    not_before_s: float = field(default=-math.inf, metadata=SINCE_LATER)  # databases refuse an infinite number

    def by_clock(self, ahead_s: float) -> PlannedSegment:
        """Returns the segment by another clock, which is so many seconds ahead."""
        return self if self.not_before_s == -math.inf else replace(self, not_before_s=self.not_before_s + ahead_s)

    def until(self, last_step: int) -> PlannedSegment:
        """Returns the segment with another end: a trial that goes on is none any more."""
        if not self.is_trial or last_step <= self.last_step:
            return replace(self, last_step=last_step)
        return replace(self, last_step=last_step, is_trial=False, reason="continues after its trial")


def waits_of(plan: Plan, problem: Problem) -> set[Segment]:
    """Returns the segments that start later than the plan needs: their devices are free, and all they wait for is done.

    Where costs depend on the time, such a segment waits on purpose. In other problems there is none: whatever starts
    late may start as soon as it can.
    """
    if not problem.has_series or objective_by_name(plan.objective).only_last_end:
        return set()
    free_s: dict[DeviceId, float] = {}
    ends_s: dict[str, float] = {}
    waits = set()
    for segment in sorted(plan.segments, key=lambda segment: (segment.start_s, segment.end_s)):
        job, devices = problem.job(segment.job), [(node, k) for node, ids in segment.devices for k in ids]
        ready_s = max(job.release_s, ends_s.get(job.id, 0.0), *(ends_s.get(other, 0.0) for other in job.after))
        if segment.start_s > max(ready_s, *(free_s.get(device, 0.0) for device in devices)) + MIN_WAIT_S:
            waits.add(segment)
        free_s |= dict.fromkeys(devices, segment.end_s)
        for name in (job.id, *job.members, *job.options[segment.option].jobs):
            ends_s[name] = max(segment.end_s, ends_s.get(name, 0.0))
    return waits


def in_steps(
    plan: Plan,
    *,
    num_steps: Mapping[str, int],
    steps_done: Mapping[str, int],
    waits: Collection[Segment] = (),
    begins_s: float = 0.0,
) -> list[PlannedSegment]:
    """Returns the plan's segments in order of their start, with each job's shares of work rounded to whole steps.

    A segment that rounds to no step is omitted, unless it is the only one of its job (only an evaluation is left).

    num_steps: the last step of each job.
    steps_done: the steps that each job has done; the plan covers the steps from there to `num_steps`.
    waits: the segments that must not start before their time, as `waits_of` returns them.
    begins_s: time 0 of the plan by the clock of the dispatcher.
    """
    planned: list[PlannedSegment] = []
    of_jobs: dict[str, list[Segment]] = {}
    for segment in sorted(plan.segments, key=lambda segment: (segment.start_s, segment.end_s)):
        of_jobs.setdefault(segment.job, []).append(segment)
    for job, segments in of_jobs.items():
        done = first = steps_done.get(job, 0)
        share, num_before = 0.0, len(planned)
        for i, segment in enumerate(segments):
            share += segment.work
            is_last = i == len(segments) - 1
            last = num_steps[job] if is_last else first + round(share * (num_steps[job] - first))
            is_alone = is_last and len(planned) == num_before
            if last > done or is_alone:
                planned.append(
                    PlannedSegment(
                        job=job,
                        option=segment.option,
                        last_step=last,
                        devices=tuple((node, device) for node, devices in segment.devices for device in devices),
                        start_s=segment.start_s,
                        end_s=segment.end_s,
                        not_before_s=begins_s + segment.start_s if segment in waits else -math.inf,
                    )
                )
                done = last
    return sorted(planned, key=lambda segment: (segment.start_s, segment.end_s, segment.job))


@dataclass(frozen=True, kw_only=True)
class UserLimits:
    """The most devices that the jobs of a user may hold at a time.

    devices: by user; others have no limit.
    users: by job.
    """

    devices: Mapping[str, int] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem) -> UserLimits:
        """Returns the limits of a problem."""
        limits = problem.limits
        return cls(devices=limits, users={job.id: job.user for job in problem.jobs if job.user in limits})

    def user(self, job: str) -> str | None:
        """Returns the user of a job that has a limit, else None."""
        user = self.users.get(job)
        return user if user in self.devices else None


NO_LIMITS = UserLimits()


def startable_segments(
    planned: Sequence[PlannedSegment],
    *,
    running: Iterable[PlannedSegment],
    done_jobs: Collection[str],
    after: Mapping[str, Collection[str]],
    other_jobs: Collection[str] = (),
    num_devices: float = math.inf,
    limits: UserLimits = NO_LIMITS,
    now_s: float = math.inf,
) -> list[PlannedSegment]:
    """Returns the segments of `planned` that may start now, in their order.

    A segment that waits also precedes later ones of its user, as it does on its devices, where both exceed the limit.

    planned: the segments that have not started yet, in order.
    after: the jobs that each job depends on, if any.
    other_jobs: further jobs that running gangs train.
    num_devices: the number of devices that there are, if it is known: nothing starts once all of them are busy.
    now_s: the time by the clock of `PlannedSegment.not_before_s`; by default no segment waits for its time.
    """
    running = list(running)
    busy = {device for segment in running for device in segment.devices}
    active_jobs = {*(segment.job for segment in running), *other_jobs}
    held = Counter[str]()  # by user, the devices of segments that run or come first
    for segment in running if limits.devices else ():
        if (user := limits.user(segment.job)) is not None:
            held[user] += len(segment.devices)
    result = []
    for segment in planned:
        if len(busy) >= num_devices:
            break
        is_free = busy.isdisjoint(segment.devices) and segment.job not in active_jobs
        is_free = is_free and segment.not_before_s <= now_s + EPS_S
        if limits.devices and segment.job not in active_jobs and (user := limits.user(segment.job)) is not None:
            held[user] += len(segment.devices)
            is_free = is_free and held[user] <= limits.devices[user]
        if is_free and all(other in done_jobs for other in after.get(segment.job, ())):
            result.append(segment)
        # Whether it starts or waits, it precedes later segments of its job and on its devices.
        busy.update(segment.devices)
        active_jobs.add(segment.job)
    return result


def next_wait_s(planned: Iterable[PlannedSegment], *, now_s: float) -> float:
    """Returns the next time at which a segment has waited long enough; infinite where none waits for its time."""
    return min((s.not_before_s for s in planned if s.not_before_s > now_s + EPS_S), default=math.inf)


def end_of(
    segment: PlannedSegment,
    planned: Sequence[PlannedSegment],
    *,
    running: Iterable[PlannedSegment],
    done_jobs: Collection[str],
    after: Mapping[str, Collection[str]],
    over: Collection[str] = (),
    limits: UserLimits = NO_LIMITS,
    now_s: float = math.inf,
) -> PlannedSegment | Literal["ends", "continues"]:
    """Decides what happens when a running segment reaches its planned last step.

    The segment "ends" if its job's next segment or another segment on its devices, or within the limit of its user,
    could start once it has ended, and where its job's next segment waits for its time: the job pauses then. If the
    next segment has the same gang, it is returned: the gang continues with it without interruption. Else the segment
    "continues", as no ready segment waits for its devices.

    over: the jobs that already run beyond their planned end. They count as ended too: a segment that waits for the
        devices of several such gangs would otherwise wait for each of them in turn, without end.
    """
    own_next = next((each for each in planned if each.job == segment.job), None)
    if own_next is not None and own_next.not_before_s > now_s + EPS_S:
        return "ends"
    others = [other for other in running if other.job != segment.job and other.job not in over]
    next_segments = startable_segments(
        planned, running=others, done_jobs=done_jobs, after=after, limits=limits, now_s=now_s
    )
    following = next((each for each in next_segments if each.job == segment.job), None)
    if following is not None:
        return following if is_same_gang(following, segment) else "ends"
    user = limits.user(segment.job)
    is_awaited = any(
        not set(each.devices).isdisjoint(segment.devices) or (user is not None and limits.user(each.job) == user)
        for each in next_segments
    )
    return "ends" if is_awaited else "continues"


def is_same_gang(a: PlannedSegment, b: PlannedSegment) -> bool:
    """Whether two segments have the same job, option and devices."""
    return (a.job, a.option, set(a.devices)) == (b.job, b.option, set(b.devices))


def by_node(devices: Iterable[DeviceId]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns the numbers of devices by node."""
    numbers: dict[str, tuple[int, ...]] = {}
    for node, number in devices:
        numbers[node] = (*numbers.get(node, ()), number)
    return tuple(numbers.items())


def hand_over(
    planned: Sequence[PlannedSegment], *, running: Iterable[PlannedSegment], now_s: float = math.inf
) -> tuple[dict[str, int], list[PlannedSegment]]:
    """Fits a new plan to the running segments.

    A gang continues if the new plan begins with the same gang on its devices, and does not let it wait. Running jobs
    that do not continue must checkpoint and end.

    Returns: by running job that continues unchanged, its new last step; and the segments that are still to be started.
    """
    active = {segment.job: segment for segment in running}
    taken, seen = set[DeviceId](), set[str]()
    stays, left = dict[str, int](), list[PlannedSegment]()
    for segment in planned:
        is_first = segment.job not in seen and taken.isdisjoint(segment.devices)
        is_first = is_first and segment.not_before_s <= now_s + EPS_S
        if is_first and segment.job in active and is_same_gang(segment, active[segment.job]):
            stays[segment.job] = segment.last_step
        else:
            left.append(segment)
        seen.add(segment.job)
        taken.update(segment.devices)
    return stays, left
