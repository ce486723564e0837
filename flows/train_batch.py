"""Trains a batch of jobs: profiles the jobs, plans them together, executes the plan, and records the models."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from prefect import flow
from prefect.artifacts import create_table_artifact

from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import show_cost
from ringmaster.flows.batch.context import BatchInput, as_batch, open_run_context
from ringmaster.flows.batch.flow_runs import cancel_batches, ended
from ringmaster.flows.batch.local_executor import execute
from ringmaster.flows.batch.probe import unfit
from ringmaster.flows.batch.records import failures_told, finish_records, job_rows, tell_refused
from ringmaster.flows.batch.result import BatchResult, collect
from ringmaster.flows.batch.run_names import named
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.batch.waiting import for_prefect
from ringmaster.flows.faults import BatchFailed, InputError
from ringmaster.flows.pool.batch import train_on_pool
from ringmaster.flows.reports.page_links import flow_run_page, show_records
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.services.embedded_server import protect_embedded_server
from ringmaster.tasks.alarms import batch_failed
from ringmaster.tasks.alarms.task import sound
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.local.device_metrics import watching
from ringmaster.tasks.profiling.stage import UnfitJobs
from ringmaster.tasks.profiling.task import profile_task
from ringmaster.tasks.recording.mlflow_writer import FLOW_RUN_PAGE
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.scheduler import SweepScheduler

protect_embedded_server()  # here, as the sweep and retraining flows import this module too


@flow(
    name="train-batch",
    flow_run_name=named("train {name}"),
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
    """Trains the jobs of a batch file on this machine's devices or, where it belongs to a pool, on the pool's devices.

    Args:
        batch: Path of a batch file, its text, its content as a mapping, or a Batch's `to_json()`.
        name: Name of the flow run; by default the name of the batch.
        resume: Whether to resume the last run of this batch, which was interrupted.
        checkpoint_every_s: Seconds between checkpoints; by default derived from the cost of one checkpoint.
        seed: Seed of the planner. A pool's executor uses its own seed.

    Raises BatchFailed, with the result, where jobs have failed or were cancelled; Interrupted where Ctrl-C or SIGTERM
    has stopped the run; InputError where the batch cannot be started.
    """
    options = RunOptions(resume=resume, checkpoint_every_s=checkpoint_every_s, seed=seed)
    result = train(as_batch(batch), options)
    return ended(result, status=result.status, message=result.summary(), failure=BatchFailed)


def train(batch: Batch, options: RunOptions, *, sweep_scheduler: SweepScheduler | None = None) -> BatchResult:
    """Trains a batch within a flow run: on the pool that this machine belongs to, else on this machine alone.

    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.
    """
    if (pool := settings.pool()) is not None:
        result = train_on_pool(batch, pool, options, sweep_scheduler=sweep_scheduler)
    else:
        result = _train_here(batch, options, sweep_scheduler=sweep_scheduler)
    rows = job_rows(result)
    for_prefect(lambda: create_table_artifact(key="jobs", table=rows, description="The outcome of each job"))
    for_prefect(lambda: show_cost(batch, result))
    if result.status == "failed":
        sound(batch_failed(batch.name, message=result.summary()))
    return result


def _train_here(batch: Batch, options: RunOptions, *, sweep_scheduler: SweepScheduler | None) -> BatchResult:
    """Trains a batch on this machine alone."""
    view = current_view.get()
    with open_run_context(batch, options) as run_context:
        began_at_s, profiling_began_s = time.time(), time.monotonic()
        journal, node_context = run_context.journal, run_context.node_context
        journal.put("started_s", journal.get("started_s", began_at_s))  # a resumed batch keeps its deadlines
        journal.put("status", JobStatus.RUNNING)
        journal.put(FLOW_RUN_PAGE, flow_run_page())
        are_over = [
            name for name, record in journal.jobs().items() if record.status in (JobStatus.DONE, JobStatus.STOPPED)
        ]
        try:
            profiled = profile_task(
                node_context.batch.jobs,
                environment=node_context.environment,
                cluster=node_context.cluster,
                known=node_context.known,
                notice=view.notice,
                lend=node_context.lend,
                failed=failures_told(but=are_over),
                # Trials of a sweep may fail one by one, and a resumed batch goes on without its unfit jobs.
                all_or_none=sweep_scheduler is None and not options.resume,
                share=node_context.batch.profiling_share,
            )
        except UnfitJobs as error:
            raise InputError(unfit(error.faults)) from error
        tell_refused(profiled)
        if sweep_scheduler is not None:
            profiled = replace(profiled, jobs=sweep_scheduler.judged(profiled.jobs))
        profiling_s = time.monotonic() - profiling_began_s
        try:
            with watching(node_context.cluster) as measured:
                execute(run_context, profiled, measured=measured, seed=options.seed, sweep_scheduler=sweep_scheduler)
        finally:
            summary = partial(
                collect,
                node_context.batch,
                node_context.batch.jobs,
                journal,
                since_s=began_at_s,
                num_trials=profiled.num_trials,
                profiling_s=profiling_s,
                refused=profiled.refused,
            )
            result = summary()
            journal.put("status", result.status)
            finish_records(run_context.recorder, result)
            faults = run_context.recorder.close()
            if sweep_scheduler is not None:
                sweep_scheduler.close(run_id=run_context.recorder.run_of())
        result = summary(faults=faults)  # the models have their URIs now
        show_records(run_context.recorder, result)
        return result
