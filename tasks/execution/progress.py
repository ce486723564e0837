"""The progress of a plan: its running segments, as their gangs report them, and those that are still to be started."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.tasks.execution.dispatch import (
    NO_LIMITS,
    Command,
    DeviceId,
    PlannedSegment,
    end_of,
    hand_over,
    next_wait_s,
    startable_segments,
)
from ringmaster.tasks.execution.job_progress import reported_step
from ringmaster.tasks.profiling.machine_load import LOAD_ERROR
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.gang_events import (
    CheckpointSaved,
    Event,
    JobReady,
    JobResult,
    Steps,
)
from ringmaster.techniques.processes.reporter import STOP, until_command
from ringmaster.techniques.profiles import MEASURED

FEWEST_STEPS = 3  # before a speed is used; the first step, which warms up, does not count
USUAL_DEVIATION = 0.1  # of the seconds of single steps, relative to their mean
MAX_STEPS = 100  # the newest steps, over which a speed is measured

# How long before a segment's end it is decided whether it continues: so many seconds or steps, whichever is longer. A
# command may take longer than a step on a busy machine.
NOTICE_S, NOTICE_STEPS = 1.0, 2.5

LOOK_S = 30.0  # between two looks at the wall clock while segments wait for their time


@dataclass
class RunningSegment:
    """A segment whose gang runs.

    segment: its `last_step` is where it should end by the plan.
    profile: the profile of the option under which it runs.
    names: the names of its leases.
    first_step: the step at which it was started.
    number: its number in the journal.
    ordered_step: the step at which its gang ends without further commands.
    step: the step that it has reported.
    is_ready: whether its gang has reported that it trains.
    is_over_end: whether it has reached its planned end and continues as no segment waits for its devices.
    is_stopping: whether it was commanded to stop.
    first_steps: the first step of each other job in this gang.
    members: those of them that have not ended.
    reported_steps: the steps that members have reported.
    newest_load: the load of the machine by its newest report; by its profile where reports do not contain it.
    refusal: why the gang is stopped and its job fails: what is wrong with an event that it has reported.
    """

    segment: PlannedSegment
    profile: Profile
    names: tuple[str, ...]
    first_step: int
    number: int = 0
    ordered_step: int = 0
    step: int = 0
    is_ready: bool = False
    is_over_end: bool = False
    is_stopping: bool = False
    first_steps: Mapping[str, int] = field(default_factory=dict)
    members: set[str] = field(init=False)
    newest_load: float = field(init=False)
    reported_steps: dict[str, int] = field(default_factory=dict)
    refusal: str = ""
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    _quiet_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))  # the same steps without load
    _mean_s: float | None = None  # of `_steps_s`, once it was requested
    _is_warm: bool = False
    _learnt: dict[str, Any] = field(default_factory=dict)  # what its gang has reported, as fields of a profile
    _whole_group: Profile | None = None  # what was measured of its whole group, once a member has left

    def __post_init__(self) -> None:
        self.members, self.newest_load = set(self.first_steps), self.profile.load

    def may_go_on(self, last_step: int) -> bool:
        """Whether its gang can be commanded to end at `last_step`.

        A gang whose jobs take turns knows only the steps that it was ordered, and a verified one gets no more.
        """
        is_free = self.profile.at_once is None and not self.profile.is_untrusted
        return is_free or last_step <= self.ordered_step

    @property
    def is_held(self) -> bool:
        """Whether its gang keeps its devices until it ends by itself, so that plans have neither."""
        return self.profile.holds_devices and not self.is_stopping

    def stop(self) -> list[Command]:
        """Returns the command that stops its gang at a checkpoint; none if it was commanded to stop already."""
        commands = [] if self.is_stopping else [(self.number, STOP)]
        self.is_stopping = True
        return commands

    def move_end(self, last_step: int) -> list[Command]:
        """Returns the command by which its gang ends at another step; none if it was ordered to end no earlier."""
        self.segment = self.segment.until(last_step)
        if last_step <= self.ordered_step:
            return []
        self.ordered_step = last_step
        return [(self.number, until_command(last_step))]

    @property
    def left_s(self) -> float:
        """The seconds until its gang has done its planned steps; infinity if its speed is not known yet."""
        return (self.segment.last_step - self.step) * self.step_s if self.step_s else math.inf

    @property
    def is_about_to_end(self) -> bool:
        """Whether its gang is about to do its last planned steps, so that it must be decided now what follows."""
        return self.left_s <= max(NOTICE_S, NOTICE_STEPS * (self.step_s or 0.0))

    @property
    def switch_s(self) -> float | None:
        """The seconds that its start and a checkpoint took, without load; None before its start was reported.

        Also None where a gang of an earlier release has reported its start without its duration.
        """
        startup_s: float | None = self._learnt.get("startup_s")
        if startup_s is None:
            return None
        save_s: float | None = self._learnt.get("save_s")
        return (startup_s + (self.profile.save_s if save_s is None else save_s)) / self.load

    @property
    def jobs(self) -> set[str]:
        """All jobs that its gang trains."""
        return {self.segment.job, *self.members}

    def handle_event(self, event: Event) -> None:
        """Takes in an event of its gang about its own job."""
        if isinstance(event, CheckpointSaved):
            self._learnt |= {"save_s": event.seconds, "stall_s": event.stall_s}
        if (step := reported_step(event)) is None:
            return
        self.is_ready, self.step = True, max(self.step, step)
        if isinstance(event, JobReady):
            self._learnt["startup_s"] = event.startup_s
        elif isinstance(event, Steps):
            self._learnt["peak_bytes"] = max(self._learnt.get("peak_bytes", 0), event.peak_bytes)
            self.newest_load = self.profile.load if event.load is None else event.load
            steps_s = event.seconds if self._is_warm else event.seconds[1:]
            self._steps_s.extend(steps_s)
            self._quiet_s.extend(step_s / self.newest_load for step_s in steps_s)
            self._mean_s = None
            self._is_warm = True

    def lose(self, member: str) -> None:
        """Records that a member has left. What its group takes together is measured until then, and the rest again."""
        if member not in self.members:
            return
        if self.members == set(self.first_steps):
            self._whole_group = self.measured(JobResult())
        self.members.discard(member)
        self._steps_s.clear()
        self._quiet_s.clear()
        self._mean_s = None

    def measured(self, result: JobResult) -> Profile | None:
        """Returns the profile of its option as it was measured; None if the measurement has no information.

        Of a group, the step is that of all of its jobs, as in a trial.

        result: of its gang, if it has ended in order.
        """
        if self.members != set(self.first_steps):
            return self._whole_group
        if not self.step_s or self.profile.key is None:  # a command may report no seconds
            return None
        if {member.job for member in self.profile.members} != set(self.first_steps):  # some rest, or have ended before
            return None
        ends = (("save_s", result.save_s), ("evaluate_s", result.evaluate_s), ("export_s", result.export_s))
        learnt = {name: value for name, value in (*self._learnt.items(), *ends) if value}
        return replace(
            self.profile.under_load(self.load),
            step_s=self.step_s,
            spread=self.step_error,
            num_measured_steps=len(self._steps_s),
            source=MEASURED,
            device_type="",
            members=(),
            own_step_s=0.0,
            **({} if self.first_steps else learnt),
        )

    def handle_member_event(self, member: str, event: Event) -> None:
        """Takes in an event of its gang about a member."""
        if (step := reported_step(event)) is not None:
            self.reported_steps[member] = max(self.reported_steps.get(member, 0), step)

    def step_of(self, member: str) -> int:
        """Returns a member's step as far as it is known. Members that are all trained at once advance together."""
        ahead = self.step - self.first_step if self.profile.at_once is None else 0
        return max(self.reported_steps.get(member, 0), self.first_steps[member] + ahead)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of its newest steps, None if there are fewer than `FEWEST_STEPS`.

        Not the median: of short steps on a busy machine, few contain all the time that other processes take.
        """
        if self._mean_s is None and len(self._steps_s) >= FEWEST_STEPS:
            self._mean_s = statistics.fmean(self._steps_s)
        return self._mean_s

    @property
    def load(self) -> float:
        """How many times as long as on a quiet machine its newest steps took."""
        quiet_s = sum(self._quiet_s)
        return sum(self._steps_s) / quiet_s if quiet_s else 1.0

    @property
    def step_error(self) -> float:
        """The standard error of `step_s` without load, relative to it: steps of uneven widths take unequal seconds.

        A few steps are a poor estimate of their spread: `USUAL_DEVIATION` counts as `FEWEST_STEPS` of them. What loads
        are wrong by is wrong for all steps, however many there are.
        """
        num_steps = len(self._quiet_s)
        mean_s = sum(self._quiet_s) / num_steps if num_steps else 0.0
        if not mean_s:
            return USUAL_DEVIATION
        squares = FEWEST_STEPS * USUAL_DEVIATION**2 + sum((step_s / mean_s - 1) ** 2 for step_s in self._quiet_s)
        of_steps = math.sqrt(squares / (FEWEST_STEPS + num_steps - 1) / num_steps)
        return math.hypot(of_steps, LOAD_ERROR * math.log(self.load))


class PlanProgress:
    """The planned segments, and the running ones by their number in the journal.

    Methods that change running segments return the commands to send to their gangs.

    totals: the steps of each job.
    after: the jobs that each job depends on.
    wall_clock: seconds since the epoch, which prices of hours of the day follow.
    """

    def __init__(
        self,
        *,
        totals: Mapping[str, int],
        after: Mapping[str, Collection[str]],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.wall_clock = wall_clock
        self.planned: list[PlannedSegment] = []
        self.running: dict[int, RunningSegment] = {}
        self.limits = NO_LIMITS
        self._totals, self._after = totals, after

    @property
    def active_jobs(self) -> set[str]:
        """The jobs that running gangs train."""
        return {job for running in self.running.values() for job in running.jobs}

    def drop_passed(self, steps: Mapping[str, int]) -> None:
        """Removes the planned segments that their jobs have passed. steps: the steps done, by job."""
        self.planned = [s for s in self.planned if s.last_step > steps[s.job] or s.last_step == self._totals[s.job]]

    def startable(self, *, done_jobs: Collection[str]) -> list[PlannedSegment]:
        """Returns the planned segments that may start now."""
        members = {job for running in self.running.values() for job in running.members}
        return startable_segments(
            self.planned,
            running=self._segments(),
            done_jobs=done_jobs,
            after=self._after,
            other_jobs=members,
            limits=self.limits,
            now_s=self.wall_clock(),
        )

    def seconds_to_wait(self) -> float:
        """Returns the seconds until a planned segment may have waited long enough; infinite where none waits.

        At most `LOOK_S`: the wall clock may be set, and goes on while the machine sleeps; timeouts do not.
        """
        now_s = self.wall_clock()
        left_s = next_wait_s(self.planned, now_s=now_s) - now_s
        return min(left_s, LOOK_S) if left_s < math.inf else math.inf

    def remove_started(self, segments: Sequence[PlannedSegment]) -> None:
        """Removes segments that have been started from the planned ones."""
        started = {id(segment) for segment in segments}
        self.planned = [segment for segment in self.planned if id(segment) not in started]

    def exchange(self, devices: Mapping[DeviceId, DeviceId]) -> None:
        """Plans what is to start on each of the devices for the other one of its pair, in both directions."""
        other = {**devices, **{there: here for here, there in devices.items()}}
        self.planned = [
            replace(segment, devices=tuple(other.get(device, device) for device in segment.devices))
            if not other.keys().isdisjoint(segment.devices)
            else segment
            for segment in self.planned
        ]

    def drop(self, job: str) -> None:
        """Removes all planned segments of a job."""
        self.planned = [segment for segment in self.planned if segment.job != job]

    def put_back(self, running: RunningSegment) -> None:
        """Puts the rest of a segment back in front of the plan.

        Does nothing if the segment was replaced and the plan continues its job in another way.
        """
        job = running.segment.job
        is_replaced = running.is_stopping or running.is_over_end
        if not (is_replaced and self.has_more(job)):
            last_step = min(running.segment.last_step, self._totals[job])  # the job's steps may have been changed
            self.planned.insert(0, running.segment.until(last_step))

    def follow(self, fresh: Sequence[PlannedSegment]) -> list[Command]:
        """Follows a new plan. Gangs that it leaves in place continue; the others are commanded to stop."""
        stays, self.planned = hand_over(fresh, running=self._segments(), now_s=self.wall_clock())
        jobs = {segment.job for segment in fresh}
        commands: list[Command] = []
        for running in self.running.values():
            if running.is_held and running.segment.job not in jobs:
                continue
            last_step = stays.get(running.segment.job)
            if last_step is None:
                commands += running.stop()
            elif running.is_stopping or not running.may_go_on(last_step):  # it starts again on the same gang
                self.planned.insert(0, running.segment.until(last_step))
            else:
                running.is_over_end = False
                commands += running.move_end(last_step)
        return commands

    def reconsider_ends(self, *, done_jobs: Collection[str]) -> list[Command]:
        """Decides which gangs continue beyond their planned end.

        A gang that is about to end continues if no ready segment waits for its devices. A gang that has gone on so
        stops once one waits.
        """
        commands: list[Command] = []
        for running in self.running.values():
            segment = running.segment
            is_at_end = running.is_over_end or running.step >= segment.last_step
            if running.is_stopping or not (is_at_end or running.is_about_to_end) or not self.has_more(segment.job):
                continue
            over = {r.segment.job for r in self.running.values() if r.is_over_end}
            end = end_of(
                segment,
                self.planned,
                running=self._segments(),
                done_jobs=done_jobs,
                after=self._after,
                over=over,
                limits=self.limits,
                now_s=self.wall_clock(),
            )
            if isinstance(end, PlannedSegment):
                if not running.may_go_on(end.last_step):
                    continue
                self.planned.remove(end)
                commands += running.move_end(end.last_step)
            elif end == "ends" and is_at_end:
                commands += running.stop()
            elif end == "continues" and not running.is_over_end and running.may_go_on(self._totals[segment.job]):
                running.is_over_end = True
                commands += running.move_end(self._totals[segment.job])
        return commands

    def has_more(self, job: str) -> bool:
        """Whether a further segment of a job is planned."""
        return any(segment.job == job for segment in self.planned)

    def _segments(self) -> list[PlannedSegment]:
        return [running.segment for running in self.running.values()]
