"""A simulator of plans, which are played by the rules of `dispatch`: what ends when, which forecasts and prices ask.

It has no clock: times are those of the simulation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ringmaster.tasks.execution.dispatch import (
    EPS_S,
    DeviceId,
    PlannedSegment,
    UserLimits,
    by_node,
    end_of,
    hand_over,
    is_same_gang,
    next_wait_s,
    startable_segments,
)
from ringmaster.tasks.planning import Plan, PlanningJob, Problem, Segment

StepSeconds = Callable[[str, int], float]
"""Returns the seconds of a step of a job under its option of that number."""


@dataclass(frozen=True, kw_only=True)
class OngoingSegment:
    """A simulated segment that runs.

    segment: its `last_step` is where it ends.
    first_step: the step from which it runs.
    works_from_s: when its first step begins.
    step_s: seconds of a step.
    is_over_end: whether it has reached its planned end and continues as no segment waits for its devices.
    ends_s: when its checkpoint and evaluation are done, set once its steps are.
    """

    segment: PlannedSegment
    first_step: int
    works_from_s: float
    step_s: float
    is_over_end: bool = False
    ends_s: float | None = None

    @property
    def steps_end_s(self) -> float:
        """When its last step is done."""
        return self.works_from_s + (self.segment.last_step - self.first_step) * self.step_s

    @property
    def next_s(self) -> float:
        """When something happens next: its last step is done, or its checkpoint and evaluation are."""
        return self.steps_end_s if self.ends_s is None else self.ends_s

    def step_at(self, now_s: float) -> int:
        """Returns the next step to begin at `now_s`. The step in progress counts as done."""
        begun = math.ceil((now_s - self.works_from_s) / self.step_s - 1e-6) if now_s > self.works_from_s else 0
        return min(self.first_step + begun, self.segment.last_step)


@dataclass(frozen=True, kw_only=True)
class SimulatedSegment:
    """A simulated segment that has ended.

    starts_s: from when it held its devices.
    """

    stretch: OngoingSegment
    starts_s: float
    ends_s: float


CHANGING = (
    "planned", "steps", "running", "ran", "out", "ended_s", "segments",
    "_next_s", "_began_s", "_held_s", "_devices", "_stood_at_s", "_crashed",
)  # fmt: skip
"""The collections of a `PlanSimulator` that change as it advances."""


class PlanSimulator:
    """The state of every job at `now_s`, which `advance` moves forward at the speeds of `step_s`.

    planned: the segments to start, in order of their start.
    num_steps: the steps of each job.
    step_s: seconds of a step by job and option.
    steps: the steps done so far, by job.
    running: the segments that run.
    ran: the last segment of each job that has run and does not run now.
    out: the devices that have failed, and when they are back.
    now_s: the simulated time.
    problem_begins_s: time 0 of the problem, from which its deadlines and releases count, by the simulated clock.
    """

    def __init__(
        self,
        problem: Problem,
        planned: Iterable[PlannedSegment],
        *,
        num_steps: Mapping[str, int],
        step_s: StepSeconds,
        steps: Mapping[str, int] | None = None,
        running: Iterable[OngoingSegment] = (),
        ran: Mapping[str, PlannedSegment] | None = None,
        out: Mapping[DeviceId, float] | None = None,
        now_s: float = 0.0,
        problem_begins_s: float = 0.0,
    ) -> None:
        self.problem, self.planned, self.now_s = problem, list(planned), now_s
        self._problem_begins_s = problem_begins_s
        self.steps = dict.fromkeys(num_steps, 0) | dict(steps or {})
        self.ran, self.out = dict(ran or {}), dict(out or {})
        self.running: dict[str, OngoingSegment] = {}
        self._began_s: dict[str, float] = {}  # by running job, since when its devices count as held
        self._held_s: dict[str, float] = {}  # by node, the device-seconds of segments that have ended
        self._next_s: dict[str, float] = {}  # by running job, when something happens next
        for stretch in running:
            self._put(stretch)
        self.ended_s: dict[str, float] = {}
        self.segments: list[SimulatedSegment] = []  # that have ended, in order of their ends
        self.num_switches = 0
        self._num_steps, self._step_s = num_steps, step_s
        self._stood_at_s: dict[str, float] = {}
        self._crashed: set[str] = set()
        self._jobs = {job.id: job for job in problem.jobs}
        self._devices = {(node.id, number) for node in problem.nodes for number in range(node.num_devices)}
        self._devices |= {device for segment in (*self._busy, *self.planned) for device in segment.devices}
        self._after = {job.id: (*job.after, *_gate(job)) for job in problem.jobs}
        self._limits = UserLimits.of(problem)
        self._gates = [(problem_begins_s + job.release_s, gate) for job in problem.jobs for gate in _gate(job)]
        # What other jobs wait for and is not a job of the problem has been done before.
        self._met = {other for job in problem.jobs for other in job.after} - set(self._jobs)
        self._may_start = True  # whether anything has changed since `_start_what_can`
        self._has_waits = any(segment.not_before_s > now_s for segment in self.planned)

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing is left to start."""
        return not self.running and not self.planned

    def plan_since(self, now: PlanSimulator) -> Plan:
        """Returns the segments that have ended since `now`, of which this simulator is a copy, with its time as 0."""
        segments = []
        for each in self.segments[len(now.segments) :]:
            planned, begins_s = each.stretch.segment, max(each.starts_s, now.now_s) - now.now_s
            work = (planned.last_step - each.stretch.first_step) / max(1, self._num_steps[planned.job])
            end_s = each.ends_s - now.now_s
            devices = by_node(sorted(planned.devices))
            segments.append(Segment(planned.job, planned.option, begins_s, end_s, work, 0.0, devices))
        return Plan(self.problem.name, tuple(sorted(segments, key=lambda segment: segment.start_s)))

    @property
    def late_s(self) -> float:
        """The summed delay beyond their deadlines of the jobs that have ended."""
        due = {job: self._jobs[job].deadline_s for job in self.ended_s}
        ended_s = {job: end_s - self._problem_begins_s for job, end_s in self.ended_s.items()}
        return sum(max(0.0, ended_s[job] - due_s) for job, due_s in due.items() if due_s is not None)

    @property
    def held_s(self) -> dict[str, float]:
        """By node, the device-seconds for which segments have held its devices since this simulator was made."""
        held_s = dict(self._held_s)
        for job, stretch in self.running.items():
            self._add_held(held_s, stretch, since_s=self._began_s[job])
        return held_s

    def step_of(self, job: str) -> int:
        """Returns the steps of a job that are done now, including the one in progress."""
        return self.running[job].step_at(self.now_s) if job in self.running else self.steps[job]

    def fork(self, step_s: StepSeconds | None = None) -> PlanSimulator:
        """Returns a copy that advances independently, at the speeds of `step_s` if given."""
        other = copy.copy(self)
        for name in CHANGING:
            setattr(other, name, copy.copy(getattr(self, name)))
        if step_s is not None:
            other._step_s = step_s
            for job, stretch in self.running.items():
                step, from_s = stretch.step_at(self.now_s), max(self.now_s, stretch.works_from_s)
                believed_s = step_s(job, stretch.segment.option)
                other._put(replace(stretch, first_step=step, works_from_s=from_s, step_s=believed_s))
        return other

    def insert(self, segment: PlannedSegment, *, is_first: bool) -> None:
        """Plans a further segment before all that waits, or after it."""
        self.planned.insert(0 if is_first else len(self.planned), segment)
        self._devices |= set(segment.devices)
        self._may_start = True
        self._has_waits |= segment.not_before_s > self.now_s

    def adopt(self, planned: Sequence[PlannedSegment]) -> None:
        """Follows another plan from now on. Gangs that it leaves in place continue."""
        done = [s for s in planned if s.job not in self.ended_s]
        running = [stretch.segment for stretch in self.running.values()]
        stays, self.planned = hand_over(done, running=running, now_s=self.now_s)
        self._devices |= {device for segment in self.planned for device in segment.devices}
        for job in list(self.running):
            self._set_end(job, max(stays.get(job, 0), self.step_of(job)))
        self._purge(self.running)
        self._may_start = True
        self._has_waits = any(segment.not_before_s > self.now_s for segment in self.planned)

    def advance(self, until_s: float = math.inf) -> bool:
        """Advances to the next event, at most to `until_s`. Returns whether there was an event."""
        self._start_what_can()
        next_s = min(
            min(self._next_s.values(), default=math.inf),
            min((back_s for back_s in self.out.values()), default=math.inf),
            min((at_s for at_s, _ in self._gates if at_s > self.now_s + EPS_S), default=math.inf),
            next_wait_s(self.planned, now_s=self.now_s) if self._has_waits else math.inf,
        )
        if next_s > until_s or next_s == math.inf:
            self.now_s = max(self.now_s, until_s) if until_s < math.inf else self.now_s
            self._may_start |= bool(self._gates) or self._has_waits  # a job may have been released meanwhile
            return False
        self.now_s = max(self.now_s, next_s)
        if self.out or self._gates or self._has_waits:
            self.out = {device: back_s for device, back_s in self.out.items() if back_s > self.now_s + EPS_S}
            self._may_start = True
        due = sorted(job for job, at_s in self._next_s.items() if at_s <= self.now_s + EPS_S)
        for job in [job for job in due if self.running[job].ends_s is not None]:
            self._end(job)
        for job in [job for job in due if job in self.running]:
            self._come_to_end(job)
        for job in sorted(self._over):
            stretch = self.running[job]
            if stretch.ends_s is None and self._end_of(stretch.segment) != "continues":
                self._set_end(job, stretch.step_at(self.now_s))
        return True

    def finish(self) -> float:
        """Advances to the end and returns its time; infinity if some segment can never start."""
        while self.advance():
            pass
        return self.now_s if self.is_over else math.inf

    def fail(self, device: DeviceId, *, back_s: float, kept_step: Callable[[OngoingSegment], int]) -> str | None:
        """Makes a device fail until `back_s`. The gang on it falls back to its checkpoint.

        Returns the job of that gang, None if there is none.

        kept_step: returns the step of the gang's last checkpoint.
        """
        self.out[device] = max(back_s, self.out.get(device, 0.0))
        self._may_start = True
        job = next((job for job, s in self.running.items() if device in s.segment.devices), None)
        if job is None:
            return None
        stretch = self._pop(job)
        self.steps[job] = max(stretch.first_step, kept_step(stretch))
        self.ran[job] = stretch.segment
        self._stood_at_s[job] = -math.inf
        self._crashed.add(job)
        self.planned.insert(0, stretch.segment)
        return job

    # -- the executor's rules -----------------------------------------------------------------------------------------

    @property
    def _busy(self) -> list[PlannedSegment]:
        """The segments that hold devices now. One without a job holds the devices that are out."""
        segments = [stretch.segment for stretch in self.running.values()]
        if self.out:
            segments.append(
                PlannedSegment(job="", option=0, last_step=0, devices=tuple(self.out), start_s=0.0, end_s=0.0)
            )
        return segments

    @property
    def _done(self) -> Collection[str]:
        if not (self._gates or self._met):
            return self.ended_s.keys()
        open_gates = {gate for release_s, gate in self._gates if release_s <= self.now_s + EPS_S}
        return open_gates | self.ended_s.keys() | self._met

    @property
    def _over(self) -> set[str]:
        """The running jobs that continue beyond their planned end."""
        return {job for job, stretch in self.running.items() if stretch.is_over_end}

    def _put(self, stretch: OngoingSegment) -> None:
        """Adds a running segment, or replaces that of its job."""
        job = stretch.segment.job
        self.running[job], self._next_s[job] = stretch, stretch.next_s
        self._began_s.setdefault(job, self.now_s)

    def _pop(self, job: str) -> OngoingSegment:
        """Removes the running segment of a job."""
        del self._next_s[job]
        stretch, began_s = self.running.pop(job), self._began_s.pop(job)
        self._add_held(self._held_s, stretch, since_s=began_s)
        self.segments.append(SimulatedSegment(stretch=stretch, starts_s=began_s, ends_s=self.now_s))
        return stretch

    def _add_held(self, held_s: dict[str, float], stretch: OngoingSegment, *, since_s: float) -> None:
        for node, _ in stretch.segment.devices:
            held_s[node] = held_s.get(node, 0.0) + self.now_s - since_s

    def _start_what_can(self) -> None:
        if not self._may_start:
            return
        self._may_start = False
        starting = startable_segments(
            self.planned,
            running=self._busy,
            done_jobs=self._done,
            after=self._after,
            num_devices=len(self._devices),
            limits=self._limits,
            now_s=self.now_s,
        )
        for segment in starting:
            self.planned.remove(segment)
            job = segment.job
            option = self._jobs[job].options[segment.option]
            before = self.ran.get(job)
            goes_on = (
                before is not None
                and is_same_gang(before, segment)
                and self._stood_at_s.get(job, -math.inf) >= self.now_s - EPS_S
            )
            overhead_s = 0.0
            if not goes_on:
                overhead_s = option.startup_s + (self.problem.switch_cost_s if before is not None else 0.0)
                self.num_switches += before is not None and job not in self._crashed
            self._crashed.discard(job)
            self._put(
                OngoingSegment(
                    segment=segment,
                    first_step=self.steps[job],
                    works_from_s=self.now_s + overhead_s,
                    step_s=self._step_s(job, segment.option),
                )
            )

    def _end_of(self, segment: PlannedSegment) -> PlannedSegment | Literal["ends", "continues"]:
        return end_of(
            segment,
            self.planned,
            running=self._busy,
            done_jobs=self._done,
            after=self._after,
            over=self._over,
            limits=self._limits,
            now_s=self.now_s,
        )

    def _come_to_end(self, job: str) -> None:
        """Handles the end of a segment's planned steps.

        The job ends, continues with the same gang, gives up its devices, or continues beyond the planned end.
        """
        stretch = self.running[job]
        step, total = stretch.segment.last_step, self._num_steps[job]
        if step < total and any(segment.job == job for segment in self.planned):
            end = self._end_of(stretch.segment)
            if isinstance(end, PlannedSegment):
                self.planned.remove(end)
                self._may_start = True
                self._set_end(job, end.last_step)
                return
            if end == "continues":
                segment = replace(stretch.segment, last_step=total)
                self._put(replace(stretch, segment=segment, is_over_end=True))
                return
        option = self._jobs[job].options[stretch.segment.option]
        tail_s = option.save_s + (option.evaluate_s if step == total else 0.0)
        self._put(replace(stretch, ends_s=self.now_s + tail_s))
        if tail_s == 0.0:
            self._end(job)

    def _end(self, job: str) -> None:
        stretch = self._pop(job)
        self.steps[job] = stretch.segment.last_step
        self.ran[job] = stretch.segment
        self._stood_at_s[job] = self.now_s
        self._may_start = True
        if self.steps[job] >= self._num_steps[job]:
            self.ended_s[job] = self.now_s
            self.planned = [segment for segment in self.planned if segment.job != job]
        else:
            self._purge([job])

    def _set_end(self, job: str, last_step: int) -> None:
        stretch = self.running[job]
        if stretch.ends_s is None:
            segment = replace(stretch.segment, last_step=last_step)
            self._put(replace(stretch, segment=segment, is_over_end=False))

    def _purge(self, jobs: Iterable[str]) -> None:
        """Removes planned segments that jobs have already passed."""
        passed = {job: step for job in jobs if (step := self.step_of(job)) != self._num_steps[job]}
        self.planned = [s for s in self.planned if s.last_step > passed.get(s.job, -1)]


def _gate(job: PlanningJob) -> tuple[str, ...]:
    """Returns the pseudo-job on which a job with a release time depends."""
    return (f"release of {job.id}",) if job.release_s > 0 else ()
