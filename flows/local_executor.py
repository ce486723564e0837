"""One batch on this machine alone: planned, run to its end, re-planned on the way, told by artifacts in Prefect."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from ringmaster.flows.batch_artifacts import DecisionArtifact
from ringmaster.flows.batch_records import failure, log_decision
from ringmaster.flows.fusing import Together, choose_together, goals_in
from ringmaster.flows.interrupts import stopped_by_signals
from ringmaster.flows.views import current_view
from ringmaster.flows.workshop import Workshop
from ringmaster.tasks.alarms import DeadlineAlarms
from ringmaster.tasks.alarms.task import sound
from ringmaster.tasks.execution.events import JobEnded, Listener
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.forethought import MakePlan
from ringmaster.tasks.execution.historian import Historian
from ringmaster.tasks.execution.journal import FAILED, begin
from ringmaster.tasks.execution.measured import Measured
from ringmaster.tasks.execution.replanner import POLICY, Replanner
from ringmaster.tasks.execution.roster import Enlisted
from ringmaster.tasks.execution.task import GanttArtifact, ProgressArtifact, submit_with
from ringmaster.tasks.execution.words import Words
from ringmaster.tasks.planning import Plan, Problem, ProblemError
from ringmaster.tasks.planning.checked import checked_plan
from ringmaster.tasks.planning.task import plan_task
from ringmaster.tasks.planning.terms import plan_giving_up_deadlines
from ringmaster.tasks.profiling.stage import Profiled
from ringmaster.tasks.recording import Recorded
from ringmaster.tasks.sweeping.conductor import Conductor
from ringmaster.techniques import Job

PLANNING_TIME_LIMIT_S = 10.0


def execute(
    shop: Workshop, profiled: Profiled, *, measured: Measured | None, seed: int, conductor: Conductor | None
) -> None:
    """Runs the batch to its end, or until it is interrupted.

    measured: what the devices do meanwhile. seed: of the planner. conductor: of the sweep whose trials the jobs are.
    """
    failures = _begin(shop, profiled, conductor=conductor)
    together = _choose_together(shop, profiled, seed=seed)
    with ExitStack() as stack:
        listeners = stack.enter_context(_listeners(shop, profiled, failures=failures, conductor=conductor))
        executor = Executor(
            name=shop.bench.batch.name,
            cluster=shop.bench.cluster,
            leases=shop.bench.leases,
            holder=shop.bench.holder,
            entries=_entries(shop, profiled, together),
            journal=shop.journal,
            submit=submit_with(shop.runner, measured=measured),
            make_plan=_planner(shop, seed=seed, start=together.plan),
            on_terms=partial(_on_terms, shop),
            replanner=_replanner(shop, seed=seed),
            steer=shop.runner.steer,
            listeners=listeners,
            is_open=conductor.is_open if conductor is not None else lambda: False,
        )
        if conductor is not None:
            conductor.attach(executor.direct, later=executor.call, started_s=float(shop.journal.get("started_s")))
        # Whatever ends the batch, its gangs end and their devices are free for the next one of this process.
        stack.callback(shop.bench.leases.give_back, shop.bench.device_names)
        stack.callback(shop.runner.join)
        stack.callback(shop.runner.kill_all)
        stack.enter_context(stopped_by_signals(partial(_stop, executor, shop)))
        executor.run()


def _begin(shop: Workshop, profiled: Profiled, *, conductor: Conductor | None) -> list[JobEnded]:
    """Writes down what is about to run, and what has failed already; returns that."""
    every = {job.name: job for job in shop.bench.batch.jobs}
    shop.recorder.begin(
        Recorded(jobs=every | _jobs(profiled), surveys=profiled.surveys, profiles=profiled.profiles),
        devices=shop.bench.device_names,
        num_trials=profiled.num_trials,
    )
    begin(shop.journal, shop.bench.batch.jobs, faults=profiled.faults)
    records = shop.journal.jobs()
    failures = [failure(name, why) for name, why in profiled.faults.items() if records[name].status == FAILED]
    for event in failures:
        shop.recorder.listen(event)
    if conductor is not None:
        jobs = [job for job in profiled.jobs if job.name not in profiled.faults]
        conductor.begin(shop.journal, jobs, num_slots=len(shop.bench.cluster.devices))
        for name, details in conductor.details().items():
            shop.journal.write_job(name, details=details)
    return failures


def _choose_together(shop: Workshop, profiled: Profiled, *, seed: int) -> Together:
    """The groups of jobs that are better trained together, and the plan by which they were chosen."""
    batch = shop.bench.batch
    return choose_together(
        profiled,
        jobs=[job for job in profiled.jobs if job.name not in profiled.faults],
        name=batch.name,
        cluster=shop.bench.cluster,
        journal=shop.journal,
        goals=goals_in(shop.journal.jobs()),
        on_terms=partial(_on_terms, shop),
        objective=batch.terms.objective,
        time_limit_s=PLANNING_TIME_LIMIT_S,
        seed=seed,
    )


def _entries(shop: Workshop, profiled: Profiled, together: Together) -> list[Enlisted]:
    """The batch's jobs as the executor takes them."""
    place = replace(shop.workplace, data={name: survey.data for name, survey in profiled.surveys.items()})
    jobs = _jobs(profiled)
    return [
        Enlisted(
            job=jobs.get(job.name, job),
            profiles=profiled.profiles.get(job.name, ()),
            place=place,
            together=together.profiles.get(job.name, ()),
        )
        for job in shop.bench.batch.jobs
    ]


@contextmanager
def _listeners(
    shop: Workshop, profiled: Profiled, *, failures: Sequence[JobEnded], conductor: Conductor | None
) -> Iterator[list[Listener]]:
    """Whom the executor tells what happens: the view, the records, the artifacts in Prefect, the sweep.

    failures: what was told already to all but the table of decisions.
    """
    batch, database = shop.bench.batch, shop.journal.database
    deadlines = DeadlineAlarms(batch.name, deadlines_s=batch.deadlines_s, started_s=shop.journal.get("started_s"))
    progress = ProgressArtifact(shop.journal, total_steps=sum(job.total_steps for job in profiled.jobs))
    gantt = GanttArtifact(Historian(database, name=batch.name), look=lambda chronicle: deadlines.tell(chronicle, sound))
    decisions = DecisionArtifact()
    for event in failures:
        decisions.listen(event)
    with ExitStack() as stack:
        for artifact in (progress, gantt, decisions):
            stack.callback(artifact.close)
        yield [
            current_view.get().listen,
            shop.recorder.listen,
            progress.listen,
            gantt.listen,
            Words(database).listen,
            log_decision,
            decisions.listen,
            *([] if conductor is None else [conductor.listen]),
        ]


def _replanner(shop: Workshop, *, seed: int) -> Replanner:
    """Who plans the rest again while the batch runs."""
    objective = shop.bench.batch.terms.objective
    return Replanner(
        name=shop.bench.batch.name,
        # No Prefect task: most of these plans are not followed, and one may still be in the making when the flow ends.
        make_plan=partial(checked_plan, time_limit_s=PLANNING_TIME_LIMIT_S, seed=seed, objective=objective),
        on_terms=partial(_on_terms, shop),
        policy=replace(POLICY, objective=objective),
    )


def _jobs(profiled: Profiled) -> dict[str, Job]:
    """The jobs that were profiled, by their names."""
    return {job.name: job for job in profiled.jobs}


def _on_terms(shop: Workshop, problem: Problem) -> Problem:
    """The problem under the batch's terms, as late as it is by now."""
    return shop.bench.batch.terms.on(problem, elapsed_s=_elapsed_s(shop))


def _elapsed_s(shop: Workshop) -> float:
    """Seconds since the batch was started for the first time, from which its deadlines count."""
    return time.time() - float(shop.journal.get("started_s"))


def _planner(shop: Workshop, *, seed: int, start: Plan | None) -> MakePlan:
    """How the batch's problems are planned: the first one must meet all deadlines, later ones what can still be met.

    start: the plan by which groups were chosen, which is the first one to be followed.
    """
    objective = shop.bench.batch.terms.objective
    make_plan = partial(plan_task, time_limit_s=PLANNING_TIME_LIMIT_S, seed=seed, objective=objective)

    def first(problem: Problem) -> Plan:
        try:
            return make_plan(problem, start=start)
        except ProblemError as error:
            so_far_s = _elapsed_s(shop)
            faults = [f"{fault} (seconds from now, {so_far_s:.1f} s after the start)" for fault in error.faults]
            remedy = "To fix: give the jobs that are named more time, fewer steps or more devices"
            raise ProblemError([*faults, remedy] if shop.bench.batch.deadlines_s else error.faults) from None

    def later(problem: Problem) -> Plan:
        plan, given_up = plan_giving_up_deadlines(problem, make_plan)
        if given_up:
            current_view.get().notice(f"deadlines that cannot be met any more: {', '.join(given_up)}")
        return plan

    return lambda problem: later(problem) if shop.journal.plans() else first(problem)


def _stop(executor: Executor, shop: Workshop) -> None:
    """Ends the batch in order: gangs checkpoint, and the journal says where to go on."""
    executor.stop()
    shop.runner.stop_all()
