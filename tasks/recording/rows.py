"""What is written of a batch: rows of tables, telemetry, sentences, its data, and the version of the code.

Device telemetry is named like MLflow's system metrics, so that its UI shows the points there.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.distribution import own_release
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.records import DatasetInput, MetricPoint
from ringmaster.tasks.execution.execution_events import GangReport, PlanUpdate, SegmentEnded
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.data.arrow_files import fingerprint
from ringmaster.techniques.data.encoded_rows import MANIFEST, RowManifest
from ringmaster.techniques.data.row_source import RowSource
from ringmaster.techniques.data_source import data_source_of
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.loss import loss_function, options_of
from ringmaster.techniques.processes.gang_events import DeviceTelemetry


def plan_rows(event: PlanUpdate) -> list[dict[str, Any]]:
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


def plan_sentence(event: PlanUpdate) -> str:
    """Returns the makespan and the gap of a plan, for the note of a run."""
    gap = "" if event.plan.gap is None else f", at most {event.plan.gap:.1%} above the best plan with these runtimes"
    return f"Planned: **{event.plan.makespan_s:.1f} s**{gap}."


def job_params(job: Job, *, columns: Mapping[str, str]) -> dict[str, Any]:
    """Returns the parameters of a job's run: its fields, with the options of its loss and of its kind of data.

    Options that the job leaves out have their defaults. A loss's options are called as in batch files, such as
    "loss.beta".

    columns: the column of each role that the samples were made of.
    """
    params: dict[str, Any] = to_json(job)
    options = params.pop("loss_options", {})
    try:
        function, source = loss_function(job.loss, job.loss_options), data_source_of(job.data)
    except ValueError:  # of a package that is installed where the job trains, and not here
        return params | {f"loss.{name}": value for name, value in options.items()}
    if function is not None:
        params |= {f"loss.{name}": getattr(function, name) for name in options_of(type(function))}
    data = params["data"]
    data |= {"kind": source.name, **{f"{role}_column": column for role, column in columns.items()}}
    data |= {name: getattr(job.data, name) for name in ("padding", "sampling")} if source.pads else {}
    data |= {"packing": job.data.packing} if source.packs else {}
    if isinstance(source, RowSource):
        defaults = {each.name: each.default for each in fields(source.options_class) if "usual" not in each.metadata}
        data["kwargs"] = {**{name: value for name, value in defaults.items() if name != "labels"}, **job.data.kwargs}
    return params


def profile_row(profile: Profile) -> dict[str, Any]:
    """Returns a profile as a row of a table."""
    row: dict[str, Any] = to_json(profile)
    return {**row, "config": " ".join(f"{key}={value}" for key, value in row["config"].items())}


# By the key in a telemetry event: MLflow's metric name, and the factor that converts the value.
NAMES = {
    "utilization": ("utilization_percentage", 100.0),
    "memory_bytes": ("memory_usage_megabytes", 1e-6),
    "memory_share": ("memory_usage_percentage", 100.0),
    "power_w": ("power_usage_watts", 1.0),
    "power_share": ("power_usage_percentage", 100.0),
    "temperature_c": ("temperature_celsius", 1.0),
    "clock_mhz": ("sm_clock_megahertz", 1.0),
}
ENERGY = "system/energy_joules"


def telemetry_points(event: DeviceTelemetry) -> list[MetricPoint]:
    """Returns the metric points of a telemetry event.

    `tasks/device_monitor.py` documents the form of a telemetry event. The step of a point is its time in
    seconds since the epoch: a job's segments follow each other in time, and so do its points.
    """
    where = f"system/{event.node}/" if event.node else "system/"
    step, at_ms = int(event.wall_s), int(event.wall_s * 1000)
    return [
        MetricPoint(f"{where}{device['kind']}_{number}_{name}", device[key] * factor, step, at_ms)
        for number, device in event.devices.items()
        for key, (name, factor) in NAMES.items()
        if key in device
    ]


class EnergyMeter:
    """The energy in joules that each job has used over all its segments.

    The journal stores the energy of each segment, so segments that an earlier process ran are counted too. Pass the
    executor's events to `handle_event` and `end`; passing an event twice is harmless.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._running: dict[int, dict[str, float]] = {}  # by segment and node

    def handle_event(self, report: GangReport) -> None:
        """Takes in an event of a gang; a telemetry event reports the energy that its devices have used so far."""
        if not isinstance(report.event, DeviceTelemetry):
            return
        used = [device["energy_j"] for device in report.event.devices.values() if "energy_j" in device]
        if used:
            self._running.setdefault(report.number, {})[report.event.node] = sum(used)

    def end(self, ended: SegmentEnded, *, at_ms: int) -> dict[str, list[MetricPoint]]:
        """Takes in the end of a segment; returns the energy that each of its jobs has used so far, as metric points.

        The energy of a segment is divided evenly among the jobs that it trains together. A job gets no point if no
        device reported any energy. at_ms: the time of the event, in milliseconds since the epoch.
        """
        jobs, number = (ended.segment.job, *ended.members), str(ended.number)
        used = self._running.pop(ended.number, None)
        records = self._journal.jobs()
        result: dict[str, list[MetricPoint]] = {}
        for job in jobs:
            by_segment = dict(records[job].energy_j)
            if used is not None:
                by_segment[number] = sum(used.values()) / len(jobs)
                self._journal.write_job(job, energy_j=by_segment)
            if number in by_segment:
                result[job] = [MetricPoint(ENERGY, sum(by_segment.values()), len(by_segment), at_ms)]
        return result


GIT_TAKES_AT_MOST_S = 10.0


def code_version(folder: Path | None) -> str:
    """Returns "git COMMIT" (with "+changes" if tracked files differ from it), or else "ringmaster VERSION".

    folder: the folder of the batch file, where its factories are looked up; None if there is no such folder.
    """
    commit = None if folder is None else _git(folder, "rev-parse", "HEAD")
    if folder is None or not commit:
        return f"ringmaster {own_release()}"
    changes = "+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else ""
    return f"git {commit}{changes}"


def _git(folder: Path, *words: str) -> str:
    """Returns git's output; an empty text if git is not installed or the folder is in no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],  # noqa: S607 - the user's git
            capture_output=True,
            text=True,
            check=False,
            timeout=GIT_TAKES_AT_MOST_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


ROWS = f"data/{MANIFEST}"
"""The artifact of a job's run with the content hashes of the rows that were read."""


def dataset_inputs(spec: DataSpec, prepared: Mapping[str, Any]) -> list[DatasetInput]:
    """Returns the data that a model was trained and evaluated on. prepared: the JSON form of its `PreparedData`."""
    if parts := prepared.get("parts"):
        each = (dataset_inputs(from_json(DataSpec, part["job"]["data"]), part["data"]) for part in parts)
        return list(dict.fromkeys(chain.from_iterable(each)))
    if not prepared["num_samples"]:  # a command that reads its own data reports none
        return []
    rows = manifest_of(prepared)
    window = ", ".join(f"{key}: {value}" for key, value in (spec.window or {}).items() if value is not None)
    sides = (
        ("training", "training", prepared["num_samples"], spec.split, window),
        ("evaluation", "held_out", prepared["num_held_out"], spec.held_out_split, ""),
    )
    # Rows that are held out of the same files are part of the same data; other files are other data.
    evaluated = {"name": prepared["name"], "digest": prepared["digest"]}
    if spec.held_out_path is not None or spec.held_out_split is not None:
        evaluated["digest"] = _held_out_digest(prepared)
    if spec.held_out_path is not None and spec.version is None:
        evaluated["name"] = spec.original_held_out_path or spec.held_out_path
    has_splits = spec.version is not None or spec.held_out_split is not None
    return [
        DatasetInput(
            name=prepared["name"] if side == "training" else evaluated["name"],
            digest=prepared["digest"] if side == "training" else evaluated["digest"],
            source=prepared["source"] if side == "training" else spec.held_out_path or prepared["source"],
            context=context,
            num_rows=num_samples,
            version=spec.version,
            split=split if has_splits else None,
            window=(text if spec.held_out_path is not None else window) or None,
            rows_digest=None if rows is None else rows.digest(side),
        )
        for context, side, num_samples, split, text in sides
    ]


def _held_out_digest(prepared: Mapping[str, Any]) -> str:
    """Returns the digest of the held-out samples alone; of all samples where another machine holds the data."""
    from ringmaster.techniques.data.stored_source import DESCRIPTION  # imports torch

    folder = Path(prepared["folder"])
    is_here = bool(prepared["folder"]) and (folder / DESCRIPTION).is_file()
    return fingerprint(folder, splits=("held_out",)) if is_here else str(prepared["digest"])


def manifest_of(prepared: Mapping[str, Any]) -> RowManifest | None:
    """Returns the manifest of the prepared rows; None for unnamed data, or if another machine holds the data."""
    return RowManifest.read(Path(prepared["folder"])) if prepared.get("folder") else None


def rows_text(prepared: Mapping[str, Any]) -> str | None:
    """Returns the content hashes of the rows as JSON, for the artifact `ROWS`; None if they are unknown.

    The hashed columns are in the field after them, where a sample is made of several.
    """
    rows = manifest_of(prepared)
    if rows is None:
        return None
    columns = list(dict.fromkeys(column for _, column in prepared.get("columns", ())))
    return json.dumps({**rows.to_json(), **({"columns": columns} if columns else {})})
