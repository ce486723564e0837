"""Runs a plan to its end: a small state machine that starts segments, reads their outcomes and decides what follows.

A segment's task returns its outcome as a value; only the executor decides. Done: the job goes on to its next segment,
or is finished. Preempted: the batch was told to stop. Crashed: again from the last checkpoint, a few times. Out of
memory: the option is struck out and the rest planned anew. Invalid: the job has failed; the others go on.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from tasks.execution.course import Command, Course
from tasks.execution.dispatch import PlannedSegment, in_steps
from tasks.execution.events import (
    ExecutionEvent,
    GangSaid,
    JobEnded,
    Listener,
    Planned,
    SegmentEnded,
    SegmentStarted,
    Waiting,
)
from tasks.execution.journal import DONE, FAILED, RUNNING, WAITING, Journal
from tasks.execution.orders import SegmentCall, Submit, gang_order
from tasks.execution.progress import RunningSegment
from tasks.execution.replanner import Replanner, State, Thought
from tasks.execution.workplace import Workplace
from tasks.planning import Plan, Problem
from tasks.profiling.options import planning_problem
from techniques import Job, Profile
from techniques.engine.gang import CRASHED, INVALID, OUT_OF_MEMORY, PREEMPTED, Event, Outcome
from techniques.engine.gang import DONE as SEGMENT_DONE

MOST_ATTEMPTS = 3  # of a segment that crashes without getting any further
LEASE_RETRY_S = 1.0  # other processes give devices back without telling us


Steer = Callable[[str, str], None]
"""Gives the gang of a folder a command: `STOP`, or what `until` makes."""

MakePlan = Callable[[Problem], Plan]

OnTerms = Callable[[Problem], Problem]
"""Adds what is asked of plans beside the jobs: deadlines, as they stand now, weights, prices."""


class Executor:
    """One batch on its way. `run` returns when every job is done or has failed, or after `stop`.

    replanner, steer: both, for a batch whose rest is planned anew as speeds are measured; without them it follows its
    first plan.
    """

    def __init__(
        self,
        *,
        name: str,
        jobs: Sequence[Job],
        profiles: Mapping[str, Sequence[Profile]],
        workplace: Workplace,
        journal: Journal,
        submit: Submit,
        make_plan: MakePlan,
        on_terms: OnTerms = lambda problem: problem,
        listeners: Sequence[Listener] = (),
        replanner: Replanner | None = None,
        steer: Steer | None = None,
    ) -> None:
        assert (replanner is None) == (steer is None), "a plan that changes needs gangs that can be told"
        self._name = name
        self._jobs = {job.name: job for job in jobs}
        self._profiles = {job: list(options) for job, options in profiles.items()}
        self._workplace, self._journal = workplace, journal
        self._submit, self._make_plan, self._listeners = submit, make_plan, listeners
        self._on_terms, self._replanner, self._steer = on_terms, replanner, steer
        self._attempts: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[tuple[int, Event | Future[Outcome] | Thought | None]] = queue.SimpleQueue()
        self._waited_for: set[str] = set()
        self._stopping = False
        self._bases = {job.name: job.base for job in jobs if job.base in self._jobs and job.base is not None}
        after = {job: (base,) for job, base in self._bases.items()}
        self._course = Course(totals={job.name: job.total_steps for job in jobs}, after=after)

    def run(self) -> bool:
        """Runs the batch; returns whether it came to its end (False: it was stopped on the way, and can be resumed)."""
        self._fail_orphans()
        self.replan(why="start" if not self._journal.plans() else "resumed")
        while self._course.running or (self._course.planned and not self._stopping):
            waits_for_others = not self._stopping and self._start_what_can()
            patience_s = [LEASE_RETRY_S] if waits_for_others else []
            if self._replanner is not None and self._course.running and not self._stopping:
                self._command(self._course.reconsider_ends(done_jobs=self._done()))
                self._think(self._replanner)
                patience_s.append(self._replanner.seconds_to_look())
            left_s = min(patience_s, default=math.inf)
            self._hear(timeout_s=left_s if left_s < math.inf else None)
        return not self._course.planned

    def stop(self) -> None:
        """No more segments; the caller tells the running ones to checkpoint and end. From any thread or signal."""
        self._stopping = True
        self._inbox.put((0, None))

    def replan(self, *, why: str) -> None:
        """Plans what is left; segments that run keep what the plan had for their jobs after them."""
        active = self._course.active_jobs
        records = self._journal.jobs()
        left = [job for job in self._jobs.values() if records[job.name].status in (WAITING, RUNNING)]
        jobs = [job for job in left if job.name not in active]
        kept = [segment for segment in self._course.planned if segment.job in active]
        if not jobs:
            self._course.planned = kept
            return
        done = {job.name: records[job.name].step for job in jobs}
        problem = planning_problem(jobs, self._profiles, self._workplace.cluster, name=self._name, steps_done=done)
        problem = self._on_terms(problem)
        plan = self._make_plan(problem)
        self._journal.write_plan({"problem": problem.to_json(), "plan": plan.to_json()}, why=why)
        steps = {job.name: job.total_steps for job in jobs}
        self._course.planned = [*kept, *in_steps(plan, num_steps=steps, steps_done=done)]
        if self._replanner is not None:
            self._replanner.planned(self._state())
        self._tell(Planned(problem=problem, plan=plan, why=why))

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start_what_can(self) -> bool:
        """Starts every segment that may; returns whether any must wait for devices that other processes hold."""
        steps = {name: record.step for name, record in self._journal.jobs().items()}
        lease_names = self._workplace.cluster.lease_names()
        holders: set[str] = set()
        waits = False
        for segment in self._course.startable(done_jobs=self._done(), steps=steps):
            names = tuple(lease_names[device] for device in segment.devices)
            if self._workplace.leases.take(names, holder=self._workplace.holder):
                self._start(segment, names)
            else:
                held = self._workplace.leases.held()
                holders |= {held[name] for name in names if name in held}
                waits = True
        if holders and holders != self._waited_for:
            self._tell(Waiting(holders=tuple(sorted(holders))))
        self._waited_for = holders
        return waits

    def _start(self, segment: PlannedSegment, names: tuple[str, ...]) -> None:
        profile = self._profiles[segment.job][segment.option]
        first_step = self._journal.jobs()[segment.job].step
        number = self._journal.start_segment(
            segment.job,
            {
                "technique": profile.technique,
                "config": dict(profile.config),
                "num_devices": profile.num_devices,
                "devices": list(names),
                "first_step": first_step,
                "last_step": segment.last_step,
                "planned_s": [segment.start_s, segment.end_s],
            },
        )
        self._journal.write_job(segment.job, status=RUNNING)
        self._course.planned.remove(segment)
        job, base = self._jobs[segment.job], self._bases.get(segment.job)
        order = gang_order(job, segment, profile, place=self._workplace, number=number, base=base)
        self._course.running[number] = RunningSegment(
            segment, names, first_step, folder=order.folder, ordered_step=segment.last_step, step=first_step
        )
        attempt = self._attempts.get(segment.job, 0) + 1
        self._tell(
            SegmentStarted(
                number=number,
                segment=segment,
                technique=profile.technique,
                num_devices=profile.num_devices,
                first_step=first_step,
                attempt=attempt,
            )
        )
        call = SegmentCall(
            label=f"{segment.job} [{profile.technique} x{profile.num_devices}] steps {first_step}-{segment.last_step}",
            order=order,
            num_ranks=profile.num_ranks,
            on_event=lambda event: self._inbox.put((number, event)),
        )
        self._submit(call).add_done_callback(lambda future: self._inbox.put((number, future)))

    # -- introspection -----------------------------------------------------------------------------------------------

    def _done(self) -> set[str]:
        return {name for name, record in self._journal.jobs().items() if record.status == DONE}

    def _state(self) -> State:
        records = self._journal.jobs()
        jobs = [job for job in self._jobs.values() if records[job.name].status in (WAITING, RUNNING)]
        told = {running.segment.job: running.step for running in self._course.running.values()}
        steps = {job.name: max(told.get(job.name, 0), records[job.name].step) for job in jobs}
        return State(
            jobs=jobs,
            profiles=self._profiles,
            steps=steps,
            running=tuple(self._course.running.values()),
            planned=tuple(self._course.planned),
        )

    def _think(self, replanner: Replanner) -> None:
        """Has the rest planned anew in the background where it is time to; the plan comes as a message."""
        thought = replanner.look(self._state())
        if thought is not None:
            thought.plan.add_done_callback(lambda _: self._inbox.put((0, thought)))

    def _adopt(self, thought: Thought) -> None:
        """Follows a new plan where that pays: gangs that need not move never notice, the others are told to stop."""
        assert self._replanner is not None
        fresh = None if self._stopping else self._replanner.judge(thought, self._state())
        if fresh is None:
            return
        self._command(self._course.follow(fresh))
        plan, problem = thought.plan.result(), thought.rest.problem
        self._journal.write_plan({"problem": problem.to_json(), "plan": plan.to_json()}, why=thought.why)
        self._replanner.planned(self._state())
        self._tell(Planned(problem=problem, plan=plan, why=thought.why))

    def _command(self, commands: Iterable[Command]) -> None:
        assert self._steer is not None
        for folder, command in commands:
            self._steer(folder, command)

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _hear(self, *, timeout_s: float | None) -> None:
        """Waits for one message and acts on it."""
        try:
            number, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if message is None:
            return
        if isinstance(message, Thought):
            self._adopt(message)
        elif isinstance(message, Mapping):
            self._note(number, message)
        else:
            self._end(number, _outcome(message))

    def _note(self, number: int, event: Event) -> None:
        running = self._course.running.get(number)
        if running is None:
            return
        job = running.segment.job
        running.hear(event)
        if self._replanner is not None and event["event"] == "steps":
            self._replanner.hear(running, self._profiles[job][running.segment.option])
        if event["event"] == "checkpoint":
            self._journal.write_job(job, step=event["step"])
        self._tell(GangSaid(number=number, job=job, event=event))

    def _end(self, number: int, outcome: Outcome) -> None:
        running = self._course.running.pop(number)
        self._journal.end_segment(number, {"status": outcome.status, "message": outcome.message, **outcome.result})
        self._workplace.leases.give_back(running.names)
        decide = {
            SEGMENT_DONE: self._on_done,
            PREEMPTED: self._on_preempted,
            OUT_OF_MEMORY: self._on_out_of_memory,
            CRASHED: self._on_crashed,
            INVALID: self._on_invalid,
        }[outcome.status]
        decision = decide(running, outcome)
        self._tell(SegmentEnded(number=number, segment=running.segment, outcome=outcome, decision=decision))

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _on_done(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        step = outcome.result["step"]
        self._attempts.pop(job, None)
        if step < self._jobs[job].total_steps:
            self._journal.write_job(job, status=WAITING, step=step)
            if step < running.segment.last_step:  # it was to go on, and had ended before it heard so
                self._course.put_back(running)
            return "goes on with its next segment"
        # A checkpoint of its end may have been found by a segment that was planned before it: nothing is left to do.
        self._course.drop(job)
        details = {"metrics": outcome.result["metrics"], "model_dir": str(self._workplace.model_dir(job))}
        record = self._journal.write_job(job, status=DONE, step=step, details=details)
        self._tell(JobEnded(job=job, status=DONE, message="", details={**record.details, "step": step}))
        return "the job is done"

    def _on_preempted(self, running: RunningSegment, outcome: Outcome) -> str:
        self._journal.write_job(running.segment.job, status=WAITING, step=outcome.result["step"])
        self._course.put_back(running)
        return "stopped at a checkpoint"

    def _on_crashed(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        if self._journal.jobs()[job].step > running.first_step:
            self._attempts.pop(job, None)
        self._attempts[job] = self._attempts.get(job, 0) + 1
        if self._attempts[job] >= MOST_ATTEMPTS:
            return self._fail(job, f"crashed {MOST_ATTEMPTS} times, the last time: {outcome.message}")
        self._journal.write_job(job, status=WAITING)
        self._course.put_back(running)
        return f"again from the last checkpoint (attempt {self._attempts[job] + 1} of {MOST_ATTEMPTS})"

    def _on_out_of_memory(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        profile = self._profiles[job][running.segment.option]
        self._course.drop(job)
        self._profiles[job] = [p for p in self._profiles[job] if p is not profile]
        if not self._profiles[job]:
            return self._fail(job, f"ran out of memory under its last option: {outcome.message}")
        self._journal.write_job(job, status=WAITING)
        if self._replanner is not None:
            self._replanner.forget(job)
        self.replan(why=f"{job} ran out of memory under {profile.technique} on {profile.num_devices}")
        return "planned anew without that option"

    def _on_invalid(self, running: RunningSegment, outcome: Outcome) -> str:
        return self._fail(running.segment.job, outcome.message)

    def _fail(self, job: str, message: str) -> str:
        """Gives a job up, and with it those that adapt its model; the others go on."""
        self._course.drop(job)
        record = self._journal.write_job(job, status=FAILED, message=message)
        self._tell(JobEnded(job=job, status=FAILED, message=message, details=record.details))
        self._fail_orphans()
        return "the job has failed"

    def _fail_orphans(self) -> None:
        for job, base in self._bases.items():
            records = self._journal.jobs()  # read anew: failing one job fails those that adapt it
            if records[base].status == FAILED and records[job].status != FAILED:
                self._fail(job, f"its base {base} has failed")

    def _tell(self, event: ExecutionEvent) -> None:
        for listener in self._listeners:
            listener(event)


def _outcome(future: Future[Outcome]) -> Outcome:
    """What a segment's task returned; a task that could not even start its gang counts as a crash."""
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001 - whatever a task engine raises: this segment's crash, not the batch's
        return Outcome(status=CRASHED, message=f"{type(error).__name__}: {error}")
