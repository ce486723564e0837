"""The final report of a run for a terminal: the status and duration of each job, and where to find the records."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from ringmaster.flows import settings
from ringmaster.flows.batch.result import BatchResult
from ringmaster.flows.output import message, styled
from ringmaster.flows.reports.plan_report import interval_text
from ringmaster.tasks.planning.gantt import beside_plan, counted
from ringmaster.tasks.storage.journal import JobStatus

MOST_MODELS = 8  # whose folders are listed one by one
RECORD_LATER = "remove the cause, and `ringmaster run BATCH.yaml --resume` records the rest; nothing is trained again"


def print_report(result: BatchResult, console: Console, *, home: Path) -> None:
    """Prints the jobs as a table, and the makespan beside the planned one and that of current practice."""
    job_column = Column("job", no_wrap=True)
    table = Table(job_column, "status", "technique", "devices", "steps", "held-out", "seconds", header_style="bold")
    for job in result.jobs:
        last = job["segments"][-1] if job["segments"] else None
        table.add_row(
            job["name"],
            job["status"],
            " → ".join(dict.fromkeys(segment["technique"] for segment in job["segments"])),
            " ".join(dict.fromkeys(" ".join(segment["devices"]) for segment in job["segments"])) if last else "",
            str(job["num_steps"]),
            ", ".join(f"{name} {value:.4g}" for name, value in job["metrics"].items()),
            f"{sum(segment['seconds'] for segment in job['segments']):.1f}",
            style=None if job["status"] == "done" else "red",
        )
    console.print(table)
    for job in result.jobs:
        if job["message"]:
            console.print(styled(f"{job['name']}:", "red"), message(job["message"]))
    _print_deadlines(result, console)
    _print_times(result, console)
    for fault in result.faults:
        console.print(styled("not recorded:", "yellow"), fault)
    if result.faults and result.status == "done":
        console.print(styled("trained, but not all is recorded:", "bold"), RECORD_LATER)
    console.print()
    for line in [*_models(result), *_next_steps(result), *_where_to_look(home)]:
        console.print(line, soft_wrap=True)


def _models(result: BatchResult) -> list[str]:
    """Returns where the models are: each folder, which `from_pretrained` reads, and the model in MLflow."""
    found = [job for job in result.jobs if job.get("model_dir")]
    if not found:
        return []
    width = max(len(job["name"]) for job in found)
    uris = [f"  {job['name']:{width}}  {job['model_uri'] or 'not recorded'}" for job in found[:MOST_MODELS]]
    more = [f"  and {len(found) - MOST_MODELS} more, which --json lists"] if len(found) > MOST_MODELS else []
    return [f"Models, a folder each that `from_pretrained` reads: {Path(found[0]['model_dir']).parent}", *uris, *more]


def _next_steps(result: BatchResult) -> list[str]:
    """Returns what the user may do next, each as a command."""
    failed = [job["name"] for job in result.jobs if job["status"] not in (JobStatus.DONE, JobStatus.STOPPED)]
    lines = []
    if failed:
        why = f"ringmaster logs {shlex.quote(result.batch)} {shlex.quote(failed[0])}"
        lines.append(f"Why, in its log: `{why}`")
        lines.append("Go on from the last checkpoints, done jobs are kept: `ringmaster run BATCH.yaml --resume`")
    if uri := next((job["model_uri"] for job in result.jobs if job.get("model_uri")), None):
        lines.append(f"What a model came from: `ringmaster lineage show {shlex.quote(uri)}`")
    return lines


def _where_to_look(home: Path) -> list[str]:
    """Returns the addresses of the servers, or the command that starts password-protected ones for the records.

    Each is a line.
    """
    pool, mlflow = settings.pool(), settings.tracking_uri(home)
    if pool is not None:
        return [f"MLflow:  {pool.mlflow_uri}", f"Prefect: {pool.prefect_api.removesuffix('/api')}"]
    command = f"RINGMASTER_HOME={shlex.quote(str(home))} ringmaster up --no-worker"
    away = [f"MLflow:  {mlflow}"] if mlflow.startswith("http") else []
    return [*away, f"Runs, curves and models in a browser: `{command}` says where; `ringmaster down` ends it"]


def _print_deadlines(result: BatchResult, console: Console) -> None:
    for job in result.jobs:
        if "deadline_s" not in job or job["ended_s"] is None:
            continue
        spare_s = job["deadline_s"] - job["ended_s"]
        said = f"{spare_s:.1f} s before its deadline" if spare_s >= 0 else f"{-spare_s:.1f} s after its deadline"
        console.print(f"{job['name']} ended {said}", style=None if spare_s >= 0 else "red")


def _print_times(result: BatchResult, console: Console) -> None:
    planned_s, bound_s, gap = (result.plan[key] for key in ("makespan_s", "lower_bound_s", "gap"))
    if planned_s is None:
        return
    trials = f"and {counted(result.num_trials, 'trial')}" if result.num_trials else "without a trial"
    before = f"; before it {result.profiling_s:.1f} s of inspection {trials}"
    how = "from measured runtimes" if result.is_measured else "from predicted runtimes"
    if result.prediction is not None:
        how += f"; likely {interval_text(result.prediction)}"
    rows = [
        ("took", f"{result.makespan_s:.1f} s", beside_plan(result.makespan_s, planned_s) + before),
        ("planned", f"{planned_s:.1f} s", how),
    ]
    # A bound that follows from predictions proves nothing about the run.
    if result.is_measured and bound_s is not None and gap is not None:
        rows.append(("lower bound", f"{bound_s:.1f} s", _bound_text(result.makespan_s, bound_s, gap)))
    if result.objective_value is not None and result.plan["value"] is not None:
        planned = result.plan["value"]
        than = beside_plan(result.value, planned).replace("faster", "less").replace("slower", "more")
        rows.append((result.objective, f"{result.value:.2f}", f"planned {planned:.2f}: {than}"))
    if result.fusion is not None:
        num_groups = len(result.fusion["groups"])
        how = f"{num_groups} groups on shared bases" if num_groups != 1 else "one group on a shared base"
        said = f"trained together in {how}" if num_groups else "no jobs are trained together"
        rows.append(("each alone", f"{result.fusion['alone_s']:.1f} s", f"by a plan; {said}"))
    if result.current_practice_s is not None:
        saved = (
            f"one job after another, by the same runtimes {result.current_practice_s / planned_s:.2f} times the plan"
        )
        rows.append(("current practice", f"{result.current_practice_s:.1f} s", saved))
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _bound_text(makespan_s: float, bound_s: float, gap: float) -> str:
    if makespan_s < bound_s:
        return "of plans with the runtimes as measured before; the jobs ran faster than that"
    return f"no plan with the measured runtimes is shorter; gap {gap:.1%}"
