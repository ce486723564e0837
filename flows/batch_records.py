"""What is left of a batch beside its models: a table of its jobs, its result in MLflow, its decisions in Prefect."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger
from rich.text import Text

from flows.result import BatchResult
from flows.views import describe
from tasks.execution.events import ExecutionEvent
from tasks.recording import Recorder
from techniques.values import to_json


def job_rows(result: BatchResult) -> list[dict[str, Any]]:
    """A row a job, for tables."""
    return [
        {
            "job": job["name"],
            "status": job["status"],
            "technique": ", ".join(dict.fromkeys(s["technique"] for s in job["segments"])),
            "devices": ", ".join(dict.fromkeys(str(s["num_devices"]) for s in job["segments"])),
            "steps": job["num_steps"],
            "seconds": round(sum(s["seconds"] for s in job["segments"]), 1),
            **{f"held-out {key}": round(value, 4) for key, value in job["metrics"].items()},
        }
        for job in result.jobs
    ]


def finish_records(recorder: Recorder, result: BatchResult) -> None:
    """Has the batch's run in MLflow closed with its result."""
    figures = {
        "makespan_s": result.makespan_s,
        "planned_makespan_s": result.plan["makespan_s"],
        "current_practice_s": result.current_practice_s,
        "objective_value": result.value if result.objective != "makespan" else None,
        "num_trials": float(result.num_trials),
        "profiling_s": result.profiling_s,
    }
    status = {"done": "FINISHED", "failed": "FAILED"}.get(result.status, "KILLED")
    metrics = {key: value for key, value in figures.items() if value is not None}
    recorder.finish(status=status, metrics=metrics, table=[to_json(row) for row in job_rows(result)])


def log_decision(event: ExecutionEvent) -> None:
    """An executor's listener: what was decided, and why, as the flow run's log in Prefect's UI."""
    if line := describe(event):
        get_run_logger().info(Text.from_markup(line).plain)
