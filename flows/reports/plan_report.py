"""A plan for a terminal: its Gantt chart, its quality and proof, and the makespans of simple rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringmaster.flows.output import styled
from ringmaster.tasks.planning.bounds.bounds import COUNTING
from ringmaster.tasks.planning.gantt import COLOURS, axis, counted, job_lines, margin_and_columns, rows, seconds_text
from ringmaster.tasks.planning.plans.plan import Segment

if TYPE_CHECKING:
    from ringmaster.tasks.execution.events import Prediction
    from ringmaster.tasks.planning import Plan, Problem

MOST_DEVICES = 64  # rows that a person still reads
BAR = 30  # columns of the longest bar


def print_plan(
    found: Plan, problem: Problem, simple: Mapping[str, float], console: Console, *, fused: str = ""
) -> None:
    """Prints a plan.

    simple: makespans of simple rules, by name.
    fused: a sentence about what training jobs together saves.
    """
    if problem.num_devices <= MOST_DEVICES:
        print_gantt(found, problem, console)
    else:
        console.print(f"{problem.num_devices} devices are too many for a terminal: --svg draws them", style="dim")
    console.print()
    console.print(_comparison(found, simple))
    console.print()
    for line in filter(None, (_quality(found, problem), fused, _how_to_check(found), _seconds(found))):
        console.print(line, soft_wrap=True)


def print_gantt(found: Plan, problem: Problem, console: Console) -> None:
    """Prints a row for each device, coloured by job if there are colours, else with the same characters."""
    margin, columns = margin_and_columns(problem, console.width)
    colour = {job.id: COLOURS[i % len(COLOURS)] for i, job in enumerate(problem.jobs)}
    node = ""
    for name, pieces in rows(found, problem, columns):
        if node and node != name.rpartition(":")[0]:
            console.print()
        node = name.rpartition(":")[0]
        line = Text().append(styled(f"{name[-margin:]:>{margin}} ", "dim"))
        for piece in pieces:
            ground = f" on {colour[piece.of.job]}" if isinstance(piece.of, Segment) else ""
            line.append(piece.text[: piece.num_named], f"#22303c{ground}")
            line.append(piece.text[piece.num_named :], f"#8a949c{ground}")
        console.print(line, soft_wrap=True)
    console.print(styled(axis(found, margin, columns), "dim"), soft_wrap=True)
    console.print()
    for job, text in zip(problem.jobs, job_lines(found, problem, console.width), strict=True):
        console.print(Text.assemble(styled(text[:1], f"bold {colour[job.id]}"), styled(text[1:])), soft_wrap=True)


def interval_text(prediction: Prediction) -> str:
    """Returns the interval of a predicted makespan: "18.2 to 25.0 s in 90 % of runs".

    Its middle is not shown: the makespan has one number, the planned one.
    """
    return f"{prediction.low_s:.1f} to {prediction.high_s:.1f} s in {100 * prediction.coverage:.0f} % of runs"


def _comparison(found: Plan, simple: Mapping[str, float]) -> Table:
    """Returns bars for the bound, the plan and the simple rules, relative to the plan."""
    makespan_s = found.makespan_s
    rows_: list[tuple[str, float, str]] = []
    if bound_s := found.best_bound_s:
        rows_.append(("no plan beats", bound_s, f"gap {found.makespan_s / bound_s - 1:.2%}"))
    rows_.append(("this plan", makespan_s, f"{counted(found.num_switches, 'switch', 'switches')}, by {found.method}"))
    rows_ += [(name, seconds, f"{seconds / makespan_s:.2f} times as long") for name, seconds in simple.items()]
    # Rules that are many times as long would leave the other bars too short.
    longest_s = min(max(seconds for _, seconds, _ in rows_), 2.5 * makespan_s) or 1.0
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, seconds, said in rows_:
        length = max(1, round(BAR * min(1.0, seconds / longest_s)))
        cut = "▸" if seconds > longest_s else ""
        style = {"no plan beats": "red", "this plan": "green"}.get(name, "dim")
        table.add_row(
            name, styled("█" * (length - len(cut)) + cut, style), f"{seconds:.1f} s", f"{_human(seconds)}{said}"
        )
    return table


def _human(seconds: float) -> str:
    return f"({seconds_text(seconds)}) " if seconds >= 300 else ""


def _quality(found: Plan, problem: Problem) -> str:
    gap = "" if found.gap is None else f", at most {found.gap:.2%} above the best possible one"
    what = f"makespan {found.makespan_s:.1f} s{gap}"
    if found.value is not None:
        bound = "" if found.value_bound is None else f", no plan below {found.value_bound:.2f}{gap}"
        what = f"{found.objective} {found.value:.2f}{bound}; makespan {found.makespan_s:.1f} s"
    return f"{len(problem.jobs)} jobs on {problem.num_devices} devices: {what}"


def _how_to_check(found: Plan) -> str:
    if found.solver:
        return f"bound: proved by {found.solver} (a solver, unchecked); the plan itself: ringmaster check PROBLEM PLAN"
    if not found.lower_bound_s:
        return "bound: none was proved"
    if found.proof == COUNTING:
        return f"bound: proved by {COUNTING} that are not split; ringmaster check PROBLEM PLAN recomputes it"
    return f"bound: proved by {found.proof}, which the plan carries; ringmaster check PROBLEM PLAN recomputes it"


def _seconds(found: Plan) -> str:
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.seconds.items())
    return f"seconds by stage: {stages} (in all {sum(found.seconds.values()):.2f})"
