"""What is written of an event: rows of tables, points of metrics, and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringmaster.codec import to_json
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.execution.events import Planned
from ringmaster.tasks.recording.system_metrics import telemetry_points
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.data.row_source import RowSource
from ringmaster.techniques.data_source import data_source_of
from ringmaster.techniques.loss import loss_function_of, options_of
from ringmaster.techniques.processes.events import DeviceTelemetry, Event, Metrics, Steps


def end_details(record: JobRecord) -> dict[str, Any]:
    """Returns the details that `JobEnded` carries for a job that is done."""
    return {**record.details, "step": record.step}


def plan_rows(event: Planned) -> list[dict[str, Any]]:
    """Returns the plan as a table with one row per segment."""
    return [
        {
            "job": segment.job,
            "technique": (option := event.problem.job(segment.job).options[segment.option]).technique,
            "config": " ".join(f"{key}={value}" for key, value in option.config.items()),
            "devices": " ".join(f"{node}:{i}" for node, devices in segment.devices for i in devices),
            "start_s": round(segment.start_s, 2),
            "end_s": round(segment.end_s, 2),
            "work": round(segment.work, 4),
        }
        for segment in event.plan.segments
    ]


def picture(run_id: str) -> str:
    """Returns markdown that shows the first plan of a run."""
    return model_pages.picture("The plan", run_id, "plan-1/gantt.svg")


def plan_sentence(event: Planned) -> str:
    """Returns the makespan and the gap of a plan, for the note of a run."""
    gap = "" if event.plan.gap is None else f", at most {event.plan.gap:.1%} above the best plan with these runtimes"
    return f"Planned: **{event.plan.makespan_s:.1f} s**{gap}."


def metric_points(event: Event, *, at_ms: int) -> list[MetricPoint]:
    """Returns the metrics of a gang's event.

    Each point includes its time, so that writing the same points again adds none.
    """
    match event:
        case Steps():
            now_ms = int(event.wall_s * 1000)
            rows = list(enumerate(zip(event.losses, event.seconds, strict=True), start=event.first_step + 1))
            losses = [MetricPoint("train/loss", loss, step, now_ms) for step, (loss, _) in rows]
            rewards = enumerate(event.rewards, start=event.first_step + 1)
            losses += [MetricPoint("train/reward", reward, step, now_ms) for step, reward in rewards]
            losses += [MetricPoint("train/step_s", seconds, step, now_ms) for step, (_, seconds) in rows]
            return losses + [MetricPoint(key, value, event.step, now_ms) for key, value in _speed(event).items()]
        case Metrics():
            return [MetricPoint(f"eval/{key}", value, event.step, at_ms) for key, value in event.metrics.items()]
        case DeviceTelemetry():
            return telemetry_points(event)
        case _:
            return []


def _speed(steps: Steps) -> dict[str, float]:
    """Returns the speed of reported steps on all devices, tokens without padding, and the peak memory so far."""
    seconds = sum(steps.seconds)
    rates = {"train/samples_per_s": steps.num_samples, "train/tokens_per_s": steps.num_tokens}
    found = {key: number / seconds for key, number in rates.items() if number and seconds}
    return found | ({"train/peak_memory_megabytes": steps.peak_bytes * 1e-6} if steps.peak_bytes else {})


def job_params(job: Job, *, columns: Mapping[str, str]) -> dict[str, Any]:
    """Returns the parameters of a job's run: its fields, with the options of its loss and of its kind of data.

    Options that the job leaves out have their defaults. A loss's options are called as in batch files, such as
    "loss.beta".

    columns: the column of each role that the samples were made of.
    """
    params: dict[str, Any] = to_json(job)
    options = params.pop("loss_options", {})
    try:
        function, source = loss_function_of(job.loss, job.loss_options), data_source_of(job.data)
    except ValueError:  # of a package that is installed where the job trains, and not here
        return params | {f"loss.{name}": value for name, value in options.items()}
    if function is not None:
        params |= {f"loss.{name}": getattr(function, name) for name in options_of(type(function))}
    data = params["data"]
    data |= {"kind": source.name, **{f"{role}_column": column for role, column in columns.items()}}
    data |= {name: getattr(job.data, name) for name in ("padding", "sampling")} if source.pads else {}
    data |= {"packing": job.data.packing} if source.packs else {}
    if isinstance(source, RowSource):
        data["kwargs"] = {**source.options, **job.data.kwargs}
    return params


def profile_row(profile: Profile) -> dict[str, Any]:
    """Returns a profile as a row of a table."""
    row: dict[str, Any] = to_json(profile)
    return {**row, "config": " ".join(f"{key}={value}" for key, value in row["config"].items())}
