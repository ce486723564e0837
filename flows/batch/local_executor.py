"""Executes one batch on this machine: plans, runs and re-plans it, and shows its progress in Prefect's artifacts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from ringmaster.flows.batch.artifacts import DecisionArtifact
from ringmaster.flows.batch.context import RunContext
from ringmaster.flows.batch.fusing import ChosenGroups, choose_together, goals_in
from ringmaster.flows.batch.records import failure, log_decision
from ringmaster.flows.process.interrupts import stopped_by_signals
from ringmaster.flows.reports.progress import current_view
from ringmaster.tasks.alarms import DeadlineAlarms
from ringmaster.tasks.alarms.task import sound
from ringmaster.tasks.execution.events import JobEnded, Listener
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_table import JobState
from ringmaster.tasks.execution.local.device_metrics import SegmentTelemetry
from ringmaster.tasks.execution.local.engine import LocalEngine
from ringmaster.tasks.execution.local.step_events import StepEvents
from ringmaster.tasks.execution.replanning.plan_manager import MakePlan
from ringmaster.tasks.execution.replanning.replanner import POLICY, Replanner
from ringmaster.tasks.execution.task import as_task
from ringmaster.tasks.planning import Plan, Problem, ProblemError
from ringmaster.tasks.planning.plans.checked import checked_plan
from ringmaster.tasks.planning.problems.terms import plan_giving_up_deadlines
from ringmaster.tasks.planning.task import plan_task
from ringmaster.tasks.profiling.stage import Profiled
from ringmaster.tasks.recording.async_recorder import JobsToRecord
from ringmaster.tasks.storage.journal import JobStatus, begin
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.task import GanttArtifact, ProgressArtifact
from ringmaster.techniques import Job

PLANNING_TIME_LIMIT_S = 10.0


def execute(
    run_context: RunContext,
    profiled: Profiled,
    *,
    measured: SegmentTelemetry | None,
    seed: int,
    sweep_scheduler: SweepScheduler | None,
) -> None:
    """Runs the batch until it ends or is interrupted.

    run_context: the run context.
    profiled: the profiles of its jobs.
    measured: metrics of the devices during the run.
    seed: seed of the planner.
    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.
    """
    failures = _begin(run_context, profiled, sweep_scheduler=sweep_scheduler)
    together = _choose_together(run_context, profiled, seed=seed)
    engine = LocalEngine(run_context.node_context.server, spawn=as_task, telemetry=measured)
    with ExitStack() as stack:
        listeners = stack.enter_context(
            _listeners(run_context, profiled, failures=failures, sweep_scheduler=sweep_scheduler)
        )
        executor = Executor(
            name=run_context.node_context.batch.name,
            cluster=run_context.node_context.cluster,
            leases=run_context.node_context.leases,
            holder=run_context.node_context.holder,
            entries=_entries(run_context, profiled, together),
            journal=run_context.journal,
            engine=engine,
            make_plan=_planner(run_context, seed=seed, start=together.plan),
            add_terms=partial(_on_terms, run_context),
            replanner=_replanner(run_context, seed=seed),
            listeners=listeners,
            is_open=sweep_scheduler.is_open if sweep_scheduler is not None else lambda: False,
        )
        if sweep_scheduler is not None:
            sweep_scheduler.attach(
                executor.direct, later=executor.call, started_s=float(run_context.journal.get("started_s"))
            )
        # However the batch ends, its gangs end, and their devices are free for the next batch of this process.
        stack.callback(run_context.node_context.leases.give_back, run_context.node_context.device_names)
        stack.callback(engine.close)
        stack.enter_context(stopped_by_signals(partial(_stop, executor, engine)))
        executor.run()


def _begin(run_context: RunContext, profiled: Profiled, *, sweep_scheduler: SweepScheduler | None) -> list[JobEnded]:
    """Records the jobs that are about to run, and those that have failed already; returns the events of the latter."""
    every = {job.name: job for job in run_context.node_context.batch.jobs}
    run_context.recorder.begin(
        JobsToRecord(jobs=every | _jobs(profiled), preflights=profiled.preflights, profiles=profiled.profiles),
        devices=run_context.node_context.device_names,
        num_trials=profiled.num_trials,
    )
    begin(run_context.journal, run_context.node_context.batch.jobs, faults=profiled.faults)
    records = run_context.journal.jobs()
    failures = [failure(name, why) for name, why in profiled.faults.items() if records[name].status == JobStatus.FAILED]
    for event in failures:
        run_context.recorder.listen(event)
    if sweep_scheduler is not None:
        jobs = [job for job in profiled.jobs if job.name not in profiled.faults]
        sweep_scheduler.begin(run_context.journal, jobs, num_slots=len(run_context.node_context.cluster.devices))
        for name, details in sweep_scheduler.details().items():
            run_context.journal.write_job(name, details=details)
    return failures


def _choose_together(run_context: RunContext, profiled: Profiled, *, seed: int) -> ChosenGroups:
    """Returns the groups of jobs that are better trained together, and the plan on which the choice is based."""
    batch = run_context.node_context.batch
    return choose_together(
        profiled,
        jobs=[job for job in profiled.jobs if job.name not in profiled.faults],
        name=batch.name,
        cluster=run_context.node_context.cluster,
        journal=run_context.journal,
        goals=goals_in(run_context.journal.jobs()),
        add_terms=partial(_on_terms, run_context),
        objective=batch.terms.objective,
        time_limit_s=PLANNING_TIME_LIMIT_S,
        seed=seed,
    )


def _entries(run_context: RunContext, profiled: Profiled, together: ChosenGroups) -> list[JobState]:
    """Returns the batch's jobs as the executor takes them."""
    place = replace(
        run_context.run_paths, data={name: preflight.data for name, preflight in profiled.preflights.items()}
    )
    jobs = _jobs(profiled)
    return [
        JobState(
            job=jobs.get(job.name, job),
            profiles=profiled.profiles.get(job.name, ()),
            place=place,
            together=together.profiles.get(job.name, ()),
        )
        for job in run_context.node_context.batch.jobs
    ]


@contextmanager
def _listeners(
    run_context: RunContext, profiled: Profiled, *, failures: Sequence[JobEnded], sweep_scheduler: SweepScheduler | None
) -> Iterator[list[Listener]]:
    """Yields the executor's listeners: the view, the records, the artifacts in Prefect, the sweep.

    failures: events that only the table of decisions has not received yet.
    """
    batch, database = run_context.node_context.batch, run_context.journal.database
    deadlines = DeadlineAlarms(
        batch.name, deadlines_s=batch.deadlines_s, started_s=run_context.journal.get("started_s")
    )
    progress = ProgressArtifact(run_context.journal, total_steps=sum(job.total_steps for job in profiled.jobs))
    gantt = GanttArtifact(
        TimelineReader(database, name=batch.name), look=lambda run_timeline: deadlines.tell(run_timeline, sound)
    )
    decisions = DecisionArtifact()
    for event in failures:
        decisions.listen(event)
    with ExitStack() as stack:
        for artifact in (progress, gantt, decisions):
            stack.callback(artifact.close)
        yield [
            current_view.get().listen,
            run_context.recorder.listen,
            progress.listen,
            gantt.listen,
            StepEvents(database).listen,
            log_decision,
            decisions.listen,
            *([] if sweep_scheduler is None else [sweep_scheduler.listen]),
        ]


def _replanner(run_context: RunContext, *, seed: int) -> Replanner:
    """Returns the replanner, which plans the remaining work while the batch runs."""
    objective = run_context.node_context.batch.terms.objective
    return Replanner(
        name=run_context.node_context.batch.name,
        # No Prefect task: most of these plans are not adopted, and one may still be in progress when the flow ends.
        make_plan=partial(checked_plan, time_limit_s=PLANNING_TIME_LIMIT_S, seed=seed, objective=objective),
        add_terms=partial(_on_terms, run_context),
        policy=replace(POLICY, objective=objective),
    )


def _jobs(profiled: Profiled) -> dict[str, Job]:
    """Returns the profiled jobs by name."""
    return {job.name: job for job in profiled.jobs}


def _on_terms(run_context: RunContext, problem: Problem) -> Problem:
    """Applies the batch's terms to a problem; deadlines count from the batch's first start."""
    return run_context.node_context.batch.terms.on(problem, elapsed_s=_elapsed_s(run_context))


def _elapsed_s(run_context: RunContext) -> float:
    """Returns the seconds since the first start of the batch, from which its deadlines count."""
    return time.time() - float(run_context.journal.get("started_s"))


def _planner(run_context: RunContext, *, seed: int, start: Plan | None) -> MakePlan:
    """Returns the planner of the batch: the first plan must meet all deadlines, later ones those that are still
    feasible.

    start: the plan on which the choice of groups is based, which the first plan reuses if it is as good.
    """
    objective = run_context.node_context.batch.terms.objective
    make_plan = partial(plan_task, time_limit_s=PLANNING_TIME_LIMIT_S, seed=seed, objective=objective)

    def first(problem: Problem) -> Plan:
        try:
            return make_plan(problem, start=start)
        except ProblemError as error:
            so_far_s = _elapsed_s(run_context)
            faults = [f"{fault} (seconds from now, {so_far_s:.1f} s after the start)" for fault in error.faults]
            remedy = "To fix: give the jobs that are named more time, fewer steps or more devices"
            raise ProblemError(
                [*faults, remedy] if run_context.node_context.batch.deadlines_s else error.faults
            ) from None

    def later(problem: Problem) -> Plan:
        plan, given_up = plan_giving_up_deadlines(problem, make_plan)
        if given_up:
            current_view.get().notice(f"deadlines that cannot be met any more: {', '.join(given_up)}")
        return plan

    return lambda problem: later(problem) if run_context.journal.plans() else first(problem)


def _stop(executor: Executor, engine: LocalEngine) -> None:
    """Stops the batch: gangs write checkpoints, and the journal records where to resume."""
    executor.stop()
    engine.stop_all()
