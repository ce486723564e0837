"""Trains a batch of jobs: profiles the jobs, plans them together, executes the plan, and completes the records.

    profile -> make plan -> execute -> evaluate -> record

    profile: inspects the jobs, and finds their options; then `BatchRun.begin` opens the engine and the MLflow run
    execute: trains, evaluates and records each job
    evaluate: compares the batch with its plan; no model is evaluated here
    record: completes the records, and waits for those that are still being written

Each stage is a task of the flow run in Prefect. Runs on this machine and runs on a pool have the same stages and differ
in what provides the devices.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TypeVar, cast

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled
from prefect.utilities.annotations import quote

from ringmaster.errors import BatchCancelled, BatchFailed
from ringmaster.feature_check import refuse_faulty_features
from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import show_cost
from ringmaster.flows.batch.batch_input import BatchInput, as_batch
from ringmaster.flows.batch.batch_run import BatchRun
from ringmaster.flows.batch.embedded_prefect import FlowWithServer
from ringmaster.flows.batch.flow_runs import cancel_batches, final_state, for_prefect, run_name_template
from ringmaster.flows.batch.local_run import open_local_run
from ringmaster.flows.batch.result import BatchResult, job_rows
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.caller import Caller
from ringmaster.flows.pool.pooled_run import open_pooled_run
from ringmaster.tasks.alarms import batch_failed
from ringmaster.tasks.alarms.prefect_events import emit_alarm
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.execution_events import PlanUpdate
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.profiling.task import RETRIES
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.tasks.sweeping.scheduler import SweepScheduler

T = TypeVar("T")


@FlowWithServer.of
@flow(
    name="train-batch",
    flow_run_name=run_name_template("train {name}"),
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
    caller: Caller | None = None,
) -> BatchResult:
    """Trains the jobs of a batch file on this machine's devices or, where it belongs to a pool, on the pool's devices.

    Args:
        batch: A Batch, the path of a batch file, its text, its content as a mapping, or a Batch's `to_json()`.
        name: Name of the flow run; by default the name of the batch.
        resume: Whether to resume the last run of this batch, which was interrupted.
        checkpoint_every_s: Seconds between checkpoints; by default derived from the cost of one checkpoint.
        seed: Seed of the planner. A pool's controller uses its own seed.
        caller: How progress is shown, and what is started ahead; by default nothing.

    Returns:
        The plan, and the status, metrics and model of each job.

    Raises:
        BatchFailed: Jobs have failed or were cancelled; `result` has the status of each.
        RunInterrupted: Ctrl-C or SIGTERM has stopped the run, which can be resumed.
        InputError: The batch cannot be started; the message has every fault.
    """
    options = RunOptions(resume=resume, checkpoint_every_s=checkpoint_every_s, seed=seed)
    try:
        result = run_stages(as_batch(batch), options, caller=caller)
    except BatchCancelled as error:
        return cast(BatchResult, Cancelled(message=str(error), data=error))
    return final_state(result, status=result.status, message=result.summary(), failure=BatchFailed)


def run_stages(
    batch: Batch,
    options: RunOptions,
    *,
    sweep_scheduler: SweepScheduler | None = None,
    caller: Caller | None = None,
) -> BatchResult:
    """Runs the stages within a flow run: on the pool that this machine belongs to, else on this machine alone.

    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.
    caller: the caller of the flow, which may have started servers ahead.
    """
    refuse_faulty_features()  # also where a run is retried, or its batch comes from elsewhere
    caller = caller or Caller()
    opened: AbstractContextManager[BatchRun]
    if (pool := settings.checked_pool()) is None:
        opened = open_local_run(batch, options, sweep_scheduler=sweep_scheduler, caller=caller)
    else:
        opened = open_pooled_run(batch, pool, options, sweep_scheduler=sweep_scheduler, caller=caller)
    with caller.interrupts.handled_again(), opened as run:
        profiling = profile(run)
        run.begin(profiling)
        plan = make_plan(run, _unresolved(profiling))
        records = execute(run, _unresolved(plan))
        result = evaluate(run, _unresolved(profiling), _unresolved(records))
        return record(run, _unresolved(result))


def _unresolved(value: T) -> T:
    """Returns an argument of a task in which Prefect looks for no futures: that takes seconds for a thousand jobs."""
    return cast(T, quote(value))


# -- the stages --------------------------------------------------------------------------------------------------------

# Functions of their own, though some only forward: a method of a run as a task is another task for each kind of run.


@task(name="profile", task_run_name="profile", **RETRIES, cache_policy=NO_CACHE, persist_result=False)
def profile(run: BatchRun) -> ProfilingResult:
    """Checks each job, and measures or predicts it under the techniques and numbers of devices that it may use."""
    return run.profile()


@task(name="make plan", task_run_name="make plan", cache_policy=NO_CACHE, persist_result=False)
def make_plan(run: BatchRun, profiling: ProfilingResult) -> PlanUpdate | None:
    """Plans all jobs together: technique, devices and time of each. On a pool, together with the other batches."""
    plan = run.make_plan(profiling)
    run.show_plan(plan)
    return plan


# No retries: the executor retries each job, and a flow run that is retried resumes the batch.
@task(name="execute", task_run_name="execute", cache_policy=NO_CACHE, persist_result=False)
def execute(run: BatchRun, plan: PlanUpdate | None) -> Mapping[str, JobRecord]:
    """Trains the jobs by the plan, which is renewed on the way. Each model is evaluated and recorded as it ends."""
    return run.execute(plan)


@task(name="evaluate", task_run_name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(run: BatchRun, profiling: ProfilingResult, records: Mapping[str, JobRecord]) -> BatchResult:
    """Compares the execution with its plan, and shows the metrics that `execute` has found with what they cost."""
    result = run.evaluate(profiling, records)
    rows = job_rows(result)
    notice = run.view.notice
    for_prefect(lambda: create_table_artifact(key="jobs", table=rows, description="The outcome of each job"), notice)
    for_prefect(lambda: show_cost(run.batch, result), notice)
    if result.status == "failed":
        emit_alarm(batch_failed(run.batch.name, message=result.summary()))
    return result


@task(name="record", task_run_name="record", cache_policy=NO_CACHE, persist_result=False)
def record(run: BatchRun, result: BatchResult) -> BatchResult:
    """Records the result in MLflow, and waits until models, metrics and lineage are recorded."""
    run.view.notice("recording models, metrics and lineage")
    return run.record(result)
