"""The records of a batch: the table of its jobs, its result in MLflow, and its decisions in the flow run's log."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prefect import get_run_logger
from prefect.context import FlowRunContext

from ringmaster.codec import to_json
from ringmaster.flows.batch.result import BatchResult
from ringmaster.flows.reports.progress import current_view, describe
from ringmaster.tasks.execution.events import ExecutionEvent, JobEnded, Listener, Listeners
from ringmaster.tasks.profiling.preflight import ReportFailure
from ringmaster.tasks.profiling.search import refusal_line
from ringmaster.tasks.profiling.stage import Profiled
from ringmaster.tasks.recording.async_recorder import AsyncRecorder, PoolRecorder
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.text import printable


def job_rows(result: BatchResult) -> list[dict[str, Any]]:
    """Returns a table with a row for each job."""
    return [
        {
            "job": job["name"],
            "status": job["status"],
            "technique": ", ".join(dict.fromkeys(s["technique"] for s in job["segments"])),
            "devices": ", ".join(dict.fromkeys(str(s["num_devices"]) for s in job["segments"])),
            "reason": printable(job["message"]),
            "steps": job["num_steps"],
            "seconds": round(sum(s["seconds"] for s in job["segments"]), 1),
            **{f"held-out {key}": round(value, 4) for key, value in job["metrics"].items()},
        }
        for job in result.jobs
    ]


class RecordedRun(Protocol):
    """A run of a batch, as far as the end of its records needs it.

    is_recorded: whether its records are closed.
    patience_s: how long to wait for an unavailable MLflow; None for the recorder's default.
    """

    journal: Journal
    sweep_scheduler: SweepScheduler | None
    is_recorded: bool
    patience_s: float | None

    @property
    def recorder(self) -> AsyncRecorder:
        """Writes the run into MLflow."""

    @property
    def listener_faults(self) -> Mapping[Listener, str]:
        """What is missing, and why, since a listener of the run raised; by listener."""


def close_records(run: RecordedRun, result: BatchResult) -> list[str]:
    """Records the result of a run, and waits until all is written; returns descriptions of what could not be."""
    run.is_recorded = True
    run.journal.put("status", result.status)
    finish_records(run.recorder, result)
    lost = [fault for listener, fault in run.listener_faults.items() if listener == run.recorder.listen]
    for fault in run.listener_faults.values():
        current_view.get().say(f"{fault}; the log has the traceback")
    faults = [*lost, *run.recorder.close(patience_s=run.patience_s)]
    run.journal.put("is_recorded", run.recorder.is_complete and not lost)
    if run.sweep_scheduler is not None:
        run.sweep_scheduler.close(run_id=run.recorder.run_of())
    return faults


def finish_records(recorder: AsyncRecorder, result: BatchResult) -> None:
    """Closes the batch's run in MLflow with its result."""
    figures = {
        "makespan_s": result.makespan_s,
        "planned_makespan_s": result.plan["makespan_s"],
        "current_practice_s": result.current_practice_s,
        "objective_value": result.objective_value,
        "num_trials": float(result.num_trials),
        "profiling_s": result.profiling_s,
    }
    if (prediction := result.prediction) is not None:
        figures |= {"predicted_makespan_s": prediction.makespan_s, "predicted_low_s": prediction.low_s}
        figures |= {"predicted_high_s": prediction.high_s, "machine_load": prediction.load}
        if not isinstance(recorder, PoolRecorder):  # the errors of a batch beside others say nothing of one alone
            figures |= {"prediction_spread": prediction.spread, "uncorrected_makespan_s": prediction.uncorrected_s}
    status = {"done": "FINISHED", "failed": "FAILED"}.get(result.status, "KILLED")
    metrics = {key: value for key, value in figures.items() if value is not None}
    recorder.finish(status=status, metrics=metrics, table=[to_json(row) for row in job_rows(result)])


def log_decision(event: ExecutionEvent) -> None:
    """Logs an executor's event with its reason in the flow run's log; a failed job is logged as an error."""
    if (line := describe(event)) is not None:
        has_failed = isinstance(event, JobEnded) and event.status == JobStatus.FAILED
        get_run_logger().log(logging.ERROR if has_failed else logging.INFO, line.text)


def failure(job: str, why: str) -> JobEnded:
    """Returns the event of a job that failed before any executor had it."""
    return JobEnded(job=job, status=JobStatus.FAILED, message=why, details={})


def failures_told(*, but: Iterable[str] = ()) -> ReportFailure:
    """Returns a function that reports a failed job once, at once, on the terminal and in the flow run's log.

    but: jobs that have ended before and are not reported.
    """
    listeners, told = Listeners([current_view.get().listen, log_decision]), set(but)

    def tell(job: str, why: str) -> None:
        if job not in told:
            told.add(job)
            listeners.tell(failure(job, why))

    return tell


def tell_refused(profiled: Profiled) -> None:
    """Logs which techniques were refused, and why, in the flow run's log; shows it on the terminal with --verbose."""
    if line := refusal_line({name: preflight.refusals for name, preflight in profiled.preflights.items()}):
        current_view.get().detail(line)
        if FlowRunContext.get() is not None:
            get_run_logger().info(printable(line))
