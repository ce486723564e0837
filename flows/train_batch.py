"""Trains a batch of jobs: profile what is not known, plan them together, run the plan, record what came of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from prefect import flow
from prefect.artifacts import create_table_artifact

from flows import settings
from flows.batch_artifacts import DecisionArtifact, show_cost
from flows.batch_records import finish_records, job_rows, log_decision
from flows.flow_runs import cancel_batches, ended
from flows.fusing import choose_together, goals_in
from flows.guard import guard_embedded_server
from flows.page_links import flow_run_page, show_records
from flows.pool_batch import train_on_pool
from flows.result import BatchResult, collect
from flows.views import current_view
from flows.workshop import BatchInput, Workshop, as_batch, open_workshop
from tasks.alarms import DeadlineAlarms, batch_failed
from tasks.alarms.task import sound
from tasks.batch import Batch
from tasks.execution.executor import Executor
from tasks.execution.forethought import MakePlan
from tasks.execution.historian import Historian
from tasks.execution.journal import RUNNING, begin
from tasks.execution.measured import Measured, watching
from tasks.execution.replanner import POLICY, Replanner
from tasks.execution.roster import Enlisted
from tasks.execution.task import GanttArtifact, ProgressArtifact, submit_with
from tasks.execution.words import Words
from tasks.planning import Plan, Problem, ProblemError
from tasks.planning.checked import checked_plan
from tasks.planning.task import plan_task
from tasks.planning.terms import plan_giving_up_deadlines
from tasks.profiling.stage import Profiled
from tasks.profiling.task import profile_task
from tasks.recording import Recorded
from tasks.scribe import FLOW_RUN_PAGE
from tasks.sweeping.conductor import Conductor

PLANNING_TIME_LIMIT_S = 10.0


@flow(
    name="train-batch",
    flow_run_name="train {name}",
    validate_parameters=False,
    persist_result=False,
    on_cancellation=[cancel_batches],
)
def train_batch(
    batch: BatchInput,
    name: str = "",
    resume: bool = False,
    checkpoint_every_s: float | None = None,
    seed: int = 0,
) -> BatchResult:
    """Trains the jobs of a batch file on this machine's devices or, where it belongs to a pool, on the pool's.

    Args:
        batch: Path of a batch file, the text of one, its content as a mapping, or a Batch's `to_json()`.
        name: Shown as the run's name; that of the batch where it is left out.
        resume: Go on with the last run of this batch, which was interrupted.
        checkpoint_every_s: Seconds between checkpoints; by default from what one costs.
        seed: Of the planner.
    """
    result = train(as_batch(batch), resume=resume, checkpoint_every_s=checkpoint_every_s, seed=seed)
    return ended(result, status=result.status, message=result.summary())


def train(
    batch: Batch,
    *,
    resume: bool = False,
    checkpoint_every_s: float | None = None,
    seed: int = 0,
    conductor: Conductor | None = None,
) -> BatchResult:
    """Trains a batch within a flow run: on the pool that this machine belongs to, else on this machine alone.

    conductor: of the sweep whose trials the jobs are.
    """
    if (pool := settings.pool()) is not None:
        result = train_on_pool(batch, pool, resume=resume, checkpoint_every_s=checkpoint_every_s, conductor=conductor)
    else:
        result = _train_here(
            batch, resume=resume, checkpoint_every_s=checkpoint_every_s, seed=seed, conductor=conductor
        )
    create_table_artifact(key="jobs", table=job_rows(result), description="What became of each job")
    show_cost(batch, result)
    if result.status == "failed":
        sound(batch_failed(batch.name, message=result.summary()))
    return result


def _train_here(
    batch: Batch, *, resume: bool, checkpoint_every_s: float | None, seed: int, conductor: Conductor | None
) -> BatchResult:
    """Trains a batch on this machine alone."""
    guard_embedded_server()
    view = current_view.get()
    with open_workshop(batch, resume=resume, checkpoint_every_s=checkpoint_every_s) as shop:
        since_s, started_s = time.time(), time.monotonic()
        shop.journal.put("started_s", shop.journal.get("started_s", since_s))  # a resumed batch keeps its deadlines
        shop.journal.put("status", RUNNING)
        shop.journal.put(FLOW_RUN_PAGE, flow_run_page())
        bench = shop.bench
        with bench.all_devices(view.notice):
            profiled = profile_task(
                bench.batch.jobs, site=bench.site, cluster=bench.cluster, known=bench.known, notice=view.notice
            )
        profiling_s = time.monotonic() - started_s
        try:
            with watching(bench.cluster) as measured:
                _execute(shop, profiled, measured=measured, seed=seed, conductor=conductor)
        finally:
            summary = partial(
                collect,
                bench.batch,
                bench.batch.jobs,
                shop.journal,
                since_s=since_s,
                num_trials=profiled.num_trials,
                profiling_s=profiling_s,
                refused=profiled.refused,
            )
            result = summary()
            shop.journal.put("status", result.status)
            finish_records(shop.recorder, result)
            faults = shop.recorder.close()
            if conductor is not None:
                conductor.close(run_id=shop.recorder.run_of())
        result = summary(faults=faults)  # the models have their addresses now
        show_records(shop.recorder, result)
        return result


def _execute(
    shop: Workshop, profiled: Profiled, *, measured: Measured | None, seed: int, conductor: Conductor | None
) -> None:
    """Runs the batch to its end, or until it is interrupted."""
    view, batch = current_view.get(), shop.bench.batch
    jobs = {job.name: job for job in profiled.jobs}
    shop.recorder.begin(
        Recorded(jobs=jobs, surveys=profiled.surveys, profiles=profiled.profiles),
        devices=shop.bench.device_names,
        num_trials=profiled.num_trials,
    )
    begin(shop.journal, batch.jobs, faults=profiled.faults)
    if conductor is not None:
        conductor.begin(shop.journal, profiled.jobs, num_slots=len(shop.bench.cluster.devices))
        for name, details in conductor.details().items():
            shop.journal.write_job(name, details=details)
    total_steps = sum(job.total_steps for job in profiled.jobs)

    def on_terms(problem: Problem) -> Problem:
        return batch.terms.on(problem, elapsed_s=_elapsed_s(shop))

    together = choose_together(
        profiled,
        jobs=[job for job in profiled.jobs if job.name not in profiled.faults],
        name=batch.name,
        cluster=shop.bench.cluster,
        journal=shop.journal,
        goals=goals_in(shop.journal.jobs()),
        on_terms=on_terms,
        objective=batch.terms.objective,
        time_limit_s=PLANNING_TIME_LIMIT_S,
        seed=seed,
    )
    make_plan = _planner(shop, seed=seed, start=together.plan)
    replanner = Replanner(
        name=batch.name,
        # No Prefect task: most of these plans are not followed, and one may still be in the making when the flow ends.
        make_plan=partial(checked_plan, time_limit_s=PLANNING_TIME_LIMIT_S, seed=seed, objective=batch.terms.objective),
        on_terms=on_terms,
        policy=replace(POLICY, objective=batch.terms.objective),
    )
    place = replace(shop.workplace, data={name: survey.data for name, survey in profiled.surveys.items()})
    progress = ProgressArtifact(shop.journal, total_steps=total_steps)
    deadlines = DeadlineAlarms(batch.name, deadlines_s=batch.deadlines_s, started_s=shop.journal.get("started_s"))
    gantt = GanttArtifact(
        Historian(shop.journal.database, name=batch.name),
        look=lambda chronicle: deadlines.tell(chronicle, sound),
    )
    decisions = DecisionArtifact()
    executor = Executor(
        name=batch.name,
        cluster=shop.bench.cluster,
        leases=shop.bench.leases,
        holder=shop.bench.holder,
        entries=[
            Enlisted(
                job=jobs.get(job.name, job),
                profiles=profiled.profiles.get(job.name, ()),
                place=place,
                together=together.profiles.get(job.name, ()),
            )
            for job in batch.jobs
        ],
        journal=shop.journal,
        submit=submit_with(shop.runner, measured=measured),
        make_plan=make_plan,
        on_terms=on_terms,
        replanner=replanner,
        steer=shop.runner.steer,
        listeners=[
            view.listen,
            shop.recorder.listen,
            progress.listen,
            gantt.listen,
            Words(shop.journal.database).listen,
            log_decision,
            decisions.listen,
            *([] if conductor is None else [conductor.listen]),
        ],
        is_open=conductor.is_open if conductor is not None else lambda: False,
    )
    if conductor is not None:
        conductor.attach(executor.direct, later=executor.call, started_s=float(shop.journal.get("started_s")))
    with ExitStack() as stack:
        stack.callback(progress.close)
        stack.callback(gantt.close)
        stack.callback(decisions.close)
        # Whatever ends the batch, its gangs end and their devices are free for the next one of this process.
        stack.callback(shop.bench.leases.give_back, shop.bench.device_names)
        stack.callback(shop.runner.join)
        stack.callback(shop.runner.kill_all)
        stack.enter_context(_stopped_by_signals(executor, shop))
        executor.run()


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


@contextmanager
def _stopped_by_signals(executor: Executor, shop: Workshop) -> Iterator[None]:
    """Ctrl-C or SIGTERM ends the batch in order: gangs checkpoint, the journal says where to go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        current_view.get().notice("stopping: running jobs write a checkpoint")
        executor.stop()
        # Not here: a handler may interrupt the very thread that holds the runner's lock.
        threading.Thread(target=shop.runner.stop_all).start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
