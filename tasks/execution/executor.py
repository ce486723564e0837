"""Runs a plan to its end: a small state machine that starts segments, reads their outcomes and decides what follows.

A segment's task returns its outcome as a value; only the executor decides. Done: the job goes on to its next segment,
or is finished. Preempted: the batch was told to stop. Crashed: again from the last checkpoint, a few times. Out of
memory: the option is struck out and the rest planned anew. Invalid: the job has failed; the others go on.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tasks.execution.cadence import checkpoint_interval_s
from tasks.execution.dispatch import PlannedSegment, in_steps, startable
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
from tasks.execution.workplace import Workplace
from tasks.planning import Plan, Problem
from tasks.profiling.options import planning_problem
from tasks.profiling.trials import slots_of
from techniques import Job, Profile, registry
from techniques.engine.gang import CRASHED, INVALID, OUT_OF_MEMORY, PREEMPTED, Event, Outcome
from techniques.engine.gang import DONE as SEGMENT_DONE
from techniques.engine.order import TRAIN, GangOrder

MOST_ATTEMPTS = 3  # of a segment that crashes without getting any further
LEASE_RETRY_S = 1.0  # other processes give devices back without telling us


@dataclass(frozen=True, kw_only=True)
class SegmentCall:
    """All that a segment's task needs: the gang's order, its ranks, and where its events go."""

    label: str
    order: GangOrder
    num_ranks: int
    on_event: Callable[[Event], None]


Submit = Callable[[SegmentCall], "Future[Outcome]"]
"""Starts a segment in the background; the future's `add_done_callback` and `result` are used."""

MakePlan = Callable[[Problem], Plan]

OnTerms = Callable[[Problem], Problem]
"""Adds what is asked of plans beside the jobs: deadlines, as they stand now, weights, prices."""


@dataclass
class _Running:
    segment: PlannedSegment
    names: tuple[str, ...]
    first_step: int


class Executor:
    """One batch on its way. `run` returns when every job is done or has failed, or after `stop`."""

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
    ) -> None:
        self._name = name
        self._jobs = {job.name: job for job in jobs}
        self._profiles = {job: list(options) for job, options in profiles.items()}
        self._workplace, self._journal = workplace, journal
        self._submit, self._make_plan, self._listeners = submit, make_plan, listeners
        self._on_terms = on_terms
        self._planned: list[PlannedSegment] = []
        self._running: dict[int, _Running] = {}
        self._attempts: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[tuple[int, Event | Future[Outcome] | None]] = queue.SimpleQueue()
        self._waited_for: set[str] = set()
        self._stopping = False
        self._bases = {job.name: job.base for job in jobs if job.base in self._jobs and job.base is not None}
        self._after = {job: (base,) for job, base in self._bases.items()}

    def run(self) -> bool:
        """Runs the batch; returns whether it came to its end (False: it was stopped on the way, and can be resumed)."""
        self._fail_orphans()
        self.replan(why="start" if not self._journal.plans() else "resumed")
        while self._running or (self._planned and not self._stopping):
            waits_for_others = not self._stopping and self._start_what_can()
            self._hear(timeout_s=LEASE_RETRY_S if waits_for_others else None)
        return not self._planned

    def stop(self) -> None:
        """No more segments; the caller tells the running ones to checkpoint and end. From any thread or signal."""
        self._stopping = True
        self._inbox.put((0, None))

    def replan(self, *, why: str) -> None:
        """Plans what is left; segments that run keep what the plan had for their jobs after them."""
        active = {running.segment.job for running in self._running.values()}
        records = self._journal.jobs()
        left = [job for job in self._jobs.values() if records[job.name].status in (WAITING, RUNNING)]
        jobs = [job for job in left if job.name not in active]
        kept = [segment for segment in self._planned if segment.job in active]
        if not jobs:
            self._planned = kept
            return
        done = {job.name: records[job.name].step for job in jobs}
        problem = planning_problem(jobs, self._profiles, self._workplace.cluster, name=self._name, steps_done=done)
        problem = self._on_terms(problem)
        plan = self._make_plan(problem)
        self._journal.write_plan({"problem": problem.to_json(), "plan": plan.to_json()}, why=why)
        steps = {job.name: job.total_steps for job in jobs}
        self._planned = [*kept, *in_steps(plan, num_steps=steps, steps_done=done)]
        self._tell(Planned(problem=problem, plan=plan, why=why))

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start_what_can(self) -> bool:
        """Starts every segment that may; returns whether any must wait for devices that other processes hold."""
        done = {name for name, record in self._journal.jobs().items() if record.status == DONE}
        running = [r.segment for r in self._running.values()]
        lease_names = self._workplace.cluster.lease_names()
        holders: set[str] = set()
        waits = False
        for segment in startable(self._planned, running=running, done_jobs=done, after=self._after):
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
        self._planned.remove(segment)
        self._running[number] = _Running(segment, names, first_step)
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
            order=self._order(segment, profile, number),
            num_ranks=profile.num_ranks,
            on_event=lambda event: self._inbox.put((number, event)),
        )
        self._submit(call).add_done_callback(lambda future: self._inbox.put((number, future)))

    def _order(self, segment: PlannedSegment, profile: Profile, number: int) -> GangOrder:
        place, job = self._workplace, self._jobs[segment.job]
        base = self._bases.get(job.name)
        weights = place.model_dir(base) if base else place.weights.get(job.name)
        every_s = place.checkpoint_every_s or checkpoint_interval_s(profile.save_s, num_devices=profile.num_devices)
        return GangOrder(
            purpose=TRAIN,
            job=job,
            technique=registry.dotted_path(profile.technique),
            config=profile.config,
            slots=slots_of([place.device(device) for device in segment.devices]),
            folder=str(place.folder / "gangs" / f"{number:04d}-{job.name}"),
            cache_dir=str(place.cache_dir),
            data=place.data.get(job.name),
            checkpoint_dir=str(place.checkpoint_dir(job.name)),
            model_dir=str(place.model_dir(job.name)),
            weights_from=str(weights) if weights else None,
            last_step=segment.last_step,
            checkpoint_every_s=every_s,
            import_paths=place.import_paths,
            ordered_at_s=time.monotonic(),
        )

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _hear(self, *, timeout_s: float | None) -> None:
        """Waits for one message and acts on it."""
        try:
            number, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if message is None:
            return
        if isinstance(message, Mapping):
            self._note(number, message)
        else:
            self._end(number, _outcome(message))

    def _note(self, number: int, event: Event) -> None:
        running = self._running.get(number)
        if running is None:
            return
        job = running.segment.job
        if event["event"] == "checkpoint":
            self._journal.write_job(job, step=event["step"])
        self._tell(GangSaid(number=number, job=job, event=event))

    def _end(self, number: int, outcome: Outcome) -> None:
        running = self._running.pop(number)
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

    def _on_done(self, running: _Running, outcome: Outcome) -> str:
        job = running.segment.job
        step = outcome.result["step"]
        self._attempts.pop(job, None)
        if step < self._jobs[job].total_steps:
            self._journal.write_job(job, status=WAITING, step=step)
            return "goes on with its next segment"
        # A checkpoint of its end may have been found by a segment that was planned before it: nothing is left to do.
        self._planned = [segment for segment in self._planned if segment.job != job]
        details = {"metrics": outcome.result["metrics"], "model_dir": str(self._workplace.model_dir(job))}
        record = self._journal.write_job(job, status=DONE, step=step, details=details)
        self._tell(JobEnded(job=job, status=DONE, message="", details={**record.details, "step": step}))
        return "the job is done"

    def _on_preempted(self, running: _Running, outcome: Outcome) -> str:
        self._journal.write_job(running.segment.job, status=WAITING, step=outcome.result["step"])
        self._put_back(running.segment)
        return "stopped at a checkpoint"

    def _on_crashed(self, running: _Running, outcome: Outcome) -> str:
        job = running.segment.job
        if self._journal.jobs()[job].step > running.first_step:
            self._attempts.pop(job, None)
        self._attempts[job] = self._attempts.get(job, 0) + 1
        if self._attempts[job] >= MOST_ATTEMPTS:
            return self._fail(job, f"crashed {MOST_ATTEMPTS} times, the last time: {outcome.message}")
        self._journal.write_job(job, status=WAITING)
        self._put_back(running.segment)
        return f"again from the last checkpoint (attempt {self._attempts[job] + 1} of {MOST_ATTEMPTS})"

    def _on_out_of_memory(self, running: _Running, outcome: Outcome) -> str:
        job = running.segment.job
        profile = self._profiles[job][running.segment.option]
        self._planned = [segment for segment in self._planned if segment.job != job]
        self._profiles[job] = [p for p in self._profiles[job] if p is not profile]
        if not self._profiles[job]:
            return self._fail(job, f"ran out of memory under its last option: {outcome.message}")
        self._journal.write_job(job, status=WAITING)
        self.replan(why=f"{job} ran out of memory under {profile.technique} on {profile.num_devices}")
        return "planned anew without that option"

    def _on_invalid(self, running: _Running, outcome: Outcome) -> str:
        return self._fail(running.segment.job, outcome.message)

    def _fail(self, job: str, message: str) -> str:
        """Gives a job up, and with it those that adapt its model; the others go on."""
        self._planned = [segment for segment in self._planned if segment.job != job]
        record = self._journal.write_job(job, status=FAILED, message=message)
        self._tell(JobEnded(job=job, status=FAILED, message=message, details=record.details))
        self._fail_orphans()
        return "the job has failed"

    def _fail_orphans(self) -> None:
        for job, base in self._bases.items():
            records = self._journal.jobs()  # read anew: failing one job fails those that adapt it
            if records[base].status == FAILED and records[job].status != FAILED:
                self._fail(job, f"its base {base} has failed")

    def _put_back(self, segment: PlannedSegment) -> None:
        self._planned.insert(0, segment)

    def _tell(self, event: ExecutionEvent) -> None:
        for listener in self._listeners:
            listener(event)


def _outcome(future: Future[Outcome]) -> Outcome:
    """What a segment's task returned; a task that could not even start its gang counts as a crash."""
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001 - whatever a task engine raises: this segment's crash, not the batch's
        return Outcome(status=CRASHED, message=f"{type(error).__name__}: {error}")


def begin(journal: Journal, jobs: Sequence[Job], *, faults: Mapping[str, str]) -> list[Job]:
    """Writes the jobs into the journal, keeping what is known of them; returns those that are left to be trained.

    A job that had failed gets another chance: whoever resumes a batch has mended something. faults: by job name, why a
    job cannot be trained at all.
    """
    known = journal.jobs()
    for job in jobs:
        if job.name not in known:
            journal.write_job(job.name)
        elif known[job.name].status != DONE:
            journal.write_job(job.name, status=WAITING, message="")
    for name, message in faults.items():
        if journal.jobs()[name].status != DONE:
            journal.write_job(name, status=FAILED, message=message)
    records: Mapping[str, Any] = journal.jobs()
    return [job for job in jobs if records[job.name].status == WAITING]
