"""A plan for a terminal: its Gantt chart, its quality and proof, and the makespans of simple rules."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ringmaster.flows import settings
from ringmaster.flows.output import message, print_lines, styled
from ringmaster.tasks.planning.bounds.bounds import COUNTING
from ringmaster.tasks.planning.durations import compared_with_plan, counted, seconds_text
from ringmaster.tasks.planning.gantt import COLOURS, axis, job_lines, margin_of, rows
from ringmaster.tasks.planning.plans.plan import Segment
from ringmaster.tasks.planning.series_bands import power_sentence
from ringmaster.techniques.metric import metrics_text
from ringmaster.techniques.processes.gang_events import NUM_ROWS

if TYPE_CHECKING:
    from ringmaster.flows.batch.result import BatchResult
    from ringmaster.tasks.execution.execution_events import Prediction
    from ringmaster.tasks.planning import Plan, Problem


MAX_DEVICES = 64  # rows that a person still reads
BAR = 30  # columns of the longest bar


def print_plan(plan: Plan, problem: Problem, simple: Mapping[str, float], console: Console, *, fused: str = "") -> None:
    """Prints a plan.

    simple: makespans of simple rules, by name.
    fused: a sentence about what training jobs together saves.
    """
    if problem.num_devices <= MAX_DEVICES:
        print_gantt(plan, problem, console)
    else:
        console.print(f"{problem.num_devices} devices are too many for a terminal: --svg draws them", style="dim")
    console.print()
    console.print(_comparison(plan, simple))
    console.print()
    lines = (_quality(plan, problem), fused, power_sentence(problem), _how_to_check(plan), _seconds(plan))
    print_lines(console, filter(None, lines))


def print_gantt(plan: Plan, problem: Problem, console: Console) -> None:
    """Prints a row for each device, coloured by job if there are colours, else with the same characters."""
    margin = margin_of((node.id, node.num_devices) for node in problem.nodes)
    columns = max(20, console.width - margin - 3)
    colour = {job.id: COLOURS[i % len(COLOURS)] for i, job in enumerate(problem.jobs)}
    node = ""
    for name, pieces in rows(plan, problem, columns):
        if node and node != name.rpartition(":")[0]:
            console.print()
        node = name.rpartition(":")[0]
        line = Text().append(styled(f"{name[-margin:]:>{margin}} ", "dim"))
        for piece in pieces:
            ground = f" on {colour[piece.of.job]}" if isinstance(piece.of, Segment) else ""
            line.append(piece.text[: piece.num_named], f"#22303c{ground}")
            line.append(piece.text[piece.num_named :], f"#8a949c{ground}")
        console.print(line, soft_wrap=True)
    console.print(styled(f"{'':>{margin}} {axis(plan.makespan_s or 1.0, columns)}", "dim"), soft_wrap=True)
    console.print()
    for job, text in zip(problem.jobs, job_lines(plan, problem, console.width), strict=True):
        console.print(Text.assemble(styled(text[:1], f"bold {colour[job.id]}"), styled(text[1:])), soft_wrap=True)


def interval_text(prediction: Prediction) -> str:
    """Returns a predicted makespan: "18.2 to 25.0 s in 90 % of runs, at the earliest 15.1 s by these runtimes".

    Its middle is not shown: the makespan has one number, the planned one. Nor is an earliest end without information.
    """
    text = f"{prediction.low_s:.1f} to {prediction.high_s:.1f} s in {100 * prediction.coverage:.0f} % of runs"
    earliest = f"{prediction.earliest_s or 0.0:.1f}"
    return text if float(earliest) == 0.0 else f"{text}, at the earliest {earliest} s by these runtimes"


def _comparison(plan: Plan, simple: Mapping[str, float]) -> Table:
    """Returns bars for the bound, the plan and the simple rules, relative to the plan."""
    makespan_s = plan.makespan_s
    rows_: list[tuple[str, float, str]] = []
    if bound_s := plan.best_bound_s:
        rows_.append(("no plan beats", bound_s, f"gap {plan.makespan_s / bound_s - 1:.2%}"))
    rows_.append(("this plan", makespan_s, f"{counted(plan.num_switches, 'switch', 'switches')}, by {plan.method}"))
    rows_ += [(name, seconds, f"{seconds / makespan_s:.2f} times as long") for name, seconds in simple.items()]
    # Rules that are many times as long would leave the other bars too short.
    longest_s = min(max(seconds for _, seconds, _ in rows_), 2.5 * makespan_s) or 1.0
    table = Table.grid(Column(justify="right"), "", Column(justify="right"), "", padding=(0, 2))
    for name, seconds, value in rows_:
        length = max(1, round(BAR * min(1.0, seconds / longest_s)))
        cut = "▸" if seconds > longest_s else ""
        style = {"no plan beats": "red", "this plan": "green"}.get(name, "dim")
        table.add_row(
            *(name, styled("█" * (length - len(cut)) + cut, style), f"{seconds:.1f} s"),
            f"({seconds_text(seconds)}) {value}" if seconds >= 300 else value,
        )
    return table


def _quality(plan: Plan, problem: Problem) -> str:
    gap = "" if plan.gap is None else f", at most {plan.gap:.2%} above the optimum"
    what = f"makespan {plan.makespan_s:.1f} s{gap}"
    if plan.value is not None:
        bound = "" if plan.value_bound is None else f", no plan below {plan.value_bound:.2f}{gap}"
        what = f"{plan.objective} {plan.value:.2f}{bound}; makespan {plan.makespan_s:.1f} s"
    return f"{len(problem.jobs)} jobs on {problem.num_devices} devices: {what}"


def _how_to_check(plan: Plan) -> str:
    if plan.solver:
        return f"bound: proved by {plan.solver} (a solver, unchecked); the plan itself: ringmaster check PROBLEM PLAN"
    if not plan.lower_bound_s:
        return "bound: none was proved"
    if plan.proof == COUNTING:
        return f"bound: proved by {COUNTING} that are not split; ringmaster check PROBLEM PLAN recomputes it"
    return f"bound: proved by {plan.proof}, which the plan carries; ringmaster check PROBLEM PLAN recomputes it"


def _seconds(plan: Plan) -> str:
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in plan.seconds.items())
    return f"seconds by stage: {stages} (in all {sum(plan.seconds.values()):.2f})"


MAX_MODELS = 8  # whose folders are listed one by one
RECORD_LATER = "remove the cause, and `ringmaster run BATCH.yaml --resume` records the rest; nothing is trained again"


def print_report(result: BatchResult, console: Console, *, home: Path) -> None:
    """Prints the jobs as a table, and the makespan, the planned one and that of current practice."""
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
            metrics_text(job["metrics"], num_rows=job.get(NUM_ROWS)),
            f"{sum(segment['seconds'] for segment in job['segments']):.1f}",
            style=None if job["status"] == "done" else "red",
        )
    console.print(table)
    for job in result.jobs:
        if job["message"]:
            console.print(styled(f"{job['name']}:", "red"), message(job["message"]))
    _print_deadlines(result, console)
    _print_times(result, console)
    from ringmaster.tasks.recording.record_hooks import record_hooks  # imports SQLAlchemy

    print_lines(console, [line for hook in record_hooks() for line in hook.batch_sentences(result.features)])
    for fault in result.faults:
        console.print(styled("not recorded:", "yellow"), fault)
    if result.faults and result.status == "done":
        console.print(styled("trained, but not all is recorded:", "bold"), RECORD_LATER)
    console.print()
    print_lines(console, [*_models(result), *_next_steps(result), *_where_to_look(home)])


def _models(result: BatchResult) -> list[str]:
    """Returns where the models are: each folder, which `from_pretrained` reads, and the model in MLflow."""
    results = [job for job in result.jobs if job.get("model_dir")]
    if not results:
        return []
    width = max(len(job["name"]) for job in results)
    uris = [f"  {job['name']:{width}}  {job['model_uri'] or 'not recorded'}" for job in results[:MAX_MODELS]]
    more = [f"  and {len(results) - MAX_MODELS} more, which --json lists"] if len(results) > MAX_MODELS else []
    if settings.num_plain_runs() == 0:
        return ["Models, a folder of each written by `ringmaster lineage restore NAME/VERSION FOLDER`:", *uris, *more]
    return [f"Models, a folder each that `from_pretrained` reads: {Path(results[0]['model_dir']).parent}", *uris, *more]


def _next_steps(result: BatchResult) -> list[str]:
    """Returns what the user may do next, each as a command."""
    from ringmaster.tasks.storage.journal import JobStatus  # imports SQLAlchemy

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
    from ringmaster.model_lineage.model_pages import home_page

    pool, mlflow = settings.checked_pool(), settings.tracking_uri(home)
    if pool is not None:
        return [f"MLflow:  {home_page(pool.mlflow_uri)}", f"Prefect: {pool.prefect_api.removesuffix('/api')}"]
    command = f"RINGMASTER_HOME={shlex.quote(str(home))} ringmaster up --no-worker"
    away = [f"MLflow:  {home_page(mlflow)}"] if mlflow.startswith("http") else []
    return [*away, f"Runs, curves and models in a browser: `{command}` says where; `ringmaster down` ends it"]


def _print_deadlines(result: BatchResult, console: Console) -> None:
    for job in result.jobs:
        if "deadline_s" not in job or job["ended_s"] is None:
            continue
        spare_s = job["deadline_s"] - job["ended_s"]
        text = f"{spare_s:.1f} s before its deadline" if spare_s >= 0 else f"{-spare_s:.1f} s after its deadline"
        console.print(f"{job['name']} ended {text}", style=None if spare_s >= 0 else "red")


def _print_times(result: BatchResult, console: Console) -> None:
    planned_s, bound_s, gap = (result.plan[key] for key in ("makespan_s", "lower_bound_s", "gap"))
    if planned_s is None:
        return
    trials = f"and {counted(result.num_trials, 'trial')}" if result.num_trials else "without a trial"
    before = f"; before it {result.profiling_s:.1f} s of preflight {trials}"
    how = "from measured runtimes" if result.is_measured else "from predicted runtimes"
    if result.prediction is not None:
        how += f"; likely {interval_text(result.prediction)}"
    rows = [
        (
            "took",
            f"{result.makespan_s:.1f} s",
            compared_with_plan(result.makespan_s, planned_s, is_whole=result.is_whole) + before,
        ),
        ("planned", f"{planned_s:.1f} s", how),
    ]
    # A bound that follows from predictions proves nothing about the run.
    if result.is_measured and bound_s is not None and gap is not None:
        rows.append(("lower bound", f"{bound_s:.1f} s", _bound_text(result.makespan_s, bound_s, gap)))
    if result.objective_value is not None and result.plan["value"] is not None:
        planned = result.plan["value"]
        than = (
            compared_with_plan(result.value, planned, is_whole=result.is_whole)
            .replace("faster", "less")
            .replace("slower", "more")
            .replace("as long", "as much")
        )
        rows.append((result.objective, f"{result.value:.2f}", f"planned {planned:.2f}: {than}"))
    if result.fusion is not None:
        num_groups = len(result.fusion.groups)
        how = f"{num_groups} groups on shared bases" if num_groups != 1 else "one group on a shared base"
        text = f"trained together in {how}" if num_groups else "no jobs are trained together"
        rows.append(("each alone", f"{result.fusion.alone_s:.1f} s", f"by a plan; {text}"))
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
