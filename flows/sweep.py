"""Trains one job under every combination of some values, as one planned batch, and ranks what comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact

from flows.flow_runs import cancel_batches, ended
from flows.result import BatchResult
from flows.sweep_form import DeviceChoice, InlineJob, JobFromFile, Over, Seed, Sweep, SweepName
from flows.train_batch import train_batch
from tasks.batch import Batch
from tasks.evaluation.compare import ranked
from techniques import Job
from techniques.values import to_json

EXAMPLE = JobFromFile(path="examples/tiny_batch.yaml", job="llama")


@flow(
    name="sweep",
    flow_run_name="sweep {name}",
    persist_result=True,
    result_serializer="json",
    on_cancellation=[cancel_batches],
)
def sweep(
    name: SweepName = "sweep",
    template: JobFromFile | InlineJob = EXAMPLE,
    over: Over = {"optimizer.lr": [1e-3, 3e-3]},  # noqa: B006 - never changed; what the form starts with
    devices: DeviceChoice = DeviceChoice(),
    seed: Seed = 0,
) -> dict[str, Any]:
    """Trains a job under every combination of some values, and ranks what comes of it.

    Args:
        name: Names the batch, and with it the registered models: letters, digits, "-", "_" and ".".
        template: The job that is varied: one of a batch file, or one that is written out.
        over: The values to try, by dotted keys of the job; every combination is trained.
        devices: What the sweep may use of this machine.
        seed: Of the planner; a job's own seed is a key that can be varied.
    """
    form = Sweep(name=name, template=template, over=over, devices=devices, seed=seed)
    batch = form.batch()
    result = train_batch(batch.to_json(), name=name, seed=seed)
    rows = leaderboard(batch, result, over=over)
    create_table_artifact(key="leaderboard", table=rows, description=f"The jobs of {name}, the best first")
    found = {
        "name": name,
        "status": result.status,
        "metric": _metric(batch),
        "best": rows[0] if rows and rows[0]["rank"] == 1 else None,
        "leaderboard": rows,
        "batch": result.to_json(),
    }
    return ended(found, status=result.status, message=result.summary())


def leaderboard(batch: Batch, result: BatchResult, *, over: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a job, the best by its first metric first; a job without a finite value comes last and has no rank."""
    metric = _metric(batch)
    jobs = {job.name: job for job in batch.jobs}
    ended = {row["name"]: row for row in result.jobs}
    values = {name: ended[name]["metrics"].get(metric, math.nan) for name in jobs}
    return [
        {
            "rank": place if math.isfinite(values[name]) else None,
            "job": name,
            **{f"held-out {key}": _shown(value) for key, value in ended[name]["metrics"].items()},
            **{key: _value(jobs[name], key) for key in over},
            "status": ended[name]["status"],
            "seconds": round(sum(segment["seconds"] for segment in ended[name]["segments"]), 1),
            "model": ended[name]["model_uri"],
        }
        for place, name in enumerate(ranked(values, metric=metric), start=1)
    ]


def _metric(batch: Batch) -> str:
    """The metric that jobs are ranked by: the first one of the first job."""
    return batch.jobs[0].evaluation.metrics[0]


def _value(job: Job, key: str) -> Any:
    """What a job has under a dotted key; lists and mappings as text, for tables."""
    value: Any = to_json(job)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return str(value) if isinstance(value, (list, dict)) else value


def _shown(value: float) -> float | None:
    """A metric as tables show it; what is not finite, which JSON lacks, as nothing."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
