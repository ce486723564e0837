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
    if result.status == "cancelled":
        console.print(
            styled("cancelled:", "bold"), "`ringmaster run BATCH.yaml --resume` goes on from the last checkpoints"
        )
    console.print(*_where_to_look(home), sep="\n", style="dim", soft_wrap=True)


def _where_to_look(home: Path) -> list[str]:
    """Returns the addresses of the servers, or the command that starts password-protected ones for the records.

    Each is a line.
    """
    pool, mlflow = settings.pool(), settings.tracking_uri(home)
    if pool is not None:
        return [f"MLflow:  {pool.mlflow_uri}", f"Prefect: {pool.prefect_api.removesuffix('/api')}"]
    command = f"RINGMASTER_HOME={shlex.quote(str(home))} ringmaster up --no-worker"
    away = [f"MLflow:  {mlflow}"] if mlflow.startswith("http") else []
    return [*away, f"In a browser: `{command}` says where; `ringmaster down` ends it"]


def _off(result: BatchResult) -> float:
    planned: float = result.plan["value"]
    return result.value / planned - 1 if planned else 0.0


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
    rows = [
        ("makespan", f"{result.makespan_s:.1f} s", f"profiling before it {result.profiling_s:.1f} s"),
        ("planned", f"{planned_s:.1f} s", f"off by {result.makespan_s / planned_s - 1:+.1%}"),
    ]
    if (prediction := result.prediction) is not None:
        known = f"by the plan and {prediction.num_earlier} earlier runs"
        rows.append(("predicted", f"{prediction.makespan_s:.1f} s", f"{interval_text(prediction)}, {known}"))
    if bound_s is not None and gap is not None:
        rows.append(("lower bound", f"{bound_s:.1f} s", f"no plan by these profiles is shorter; gap {gap:.1%}"))
    if result.objective_value is not None and result.plan["value"] is not None:
        planned = f"planned {result.plan['value']:.2f}"
        rows.append((result.objective, f"{result.value:.2f}", f"{planned}, off by {_off(result):+.1%}"))
    if result.fusion is not None:
        num_groups = len(result.fusion["groups"])
        how = f"{num_groups} groups on shared bases" if num_groups != 1 else "one group on a shared base"
        said = f"trained together in {how}" if num_groups else "no jobs are trained together"
        rows.append(("each alone", f"{result.fusion['alone_s']:.1f} s", f"by a plan; {said}"))
    if result.current_practice_s is not None:
        saved = f"{result.current_practice_s / planned_s:.2f} times the plan"
        rows.append(("current practice", f"{result.current_practice_s:.1f} s", f"one job after another: {saved}"))
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
    console.print(f"{result.num_trials} trials")
