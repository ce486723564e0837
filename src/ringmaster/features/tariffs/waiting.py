"""What waiting gains: plans of a problem with tariffs that end by later and later times, and what each takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ringmaster.codec import to_json
from ringmaster.errors import ProblemError
from ringmaster.features.tariffs.series import HOUR_S
from ringmaster.features.tariffs.tariff_values import Measures, change_points, measures_of
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.durations import seconds_text

WAITS = (1, 2, 4, 8, 12, 24)  # in steps of the series, such as hours

MakePlan = Callable[[Problem, str], Plan]
"""Plans a problem for the objective of a name. Raises ProblemError where no plan ends in time."""


@dataclass(frozen=True, kw_only=True)
class WaitGain:
    """A plan that may end later than the earliest one.

    wait_s: so many seconds later; 0 for the plan that ends earliest.
    measures: what it takes.
    least: what no plan that ends by then has of the objective; None where nothing is proved.
    """

    wait_s: float
    measures: Measures
    least: float | None = None


def wait_gains(problem: Problem, *, objective: str, make_plan: MakePlan) -> list[WaitGain]:
    """Returns what the earliest end takes, and plans that may end later.

    No plan with more time is worse than one with less. Deadlines of jobs hold. Raises ProblemError where a problem has
    no series, or no plan keeps its deadlines.
    """
    if not problem.has_series:
        raise ProblemError(
            ["nothing depends on the time, so that waiting gains nothing. To fix: give series of prices"]
        )
    free = replace(problem, budgets={})
    earliest = make_plan(free, "makespan")
    gains, best = [WaitGain(wait_s=0.0, measures=measures_of(earliest, problem))], earliest
    step_s = step_of(problem)
    for wait_s in (step_s * count for count in WAITS):
        plan = make_plan(_ending_by(free, earliest.makespan_s + wait_s), objective)
        if _worth(plan, problem, objective) < _worth(best, problem, objective):
            best = plan
        gains.append(WaitGain(wait_s=wait_s, measures=measures_of(best, problem), least=plan.value_bound))
    return gains


def step_of(problem: Problem) -> float:
    """Returns the usual seconds between two changes of series; an hour where there is at most one."""
    points = sorted(change_points(problem.nodes))
    return statistics.median([b - a for a, b in pairwise(points)]) if len(points) > 1 else HOUR_S


def gains_to_json(gains: Sequence[WaitGain], *, objective: str) -> dict[str, Any]:
    """Returns the gains as plain values."""
    rows = [{"wait_s": each.wait_s, **to_json(each.measures), "least": each.least} for each in gains]
    return {"objective": objective, "waits": rows}


def gain_lines(gains: Sequence[WaitGain], problem: Problem, *, objective: str) -> Iterator[str]:
    """Yields a table: the latest end, the end, money and emissions, each beside what the earliest end takes."""
    first = gains[0].measures
    emits = any(node.carbon_steps for node in problem.nodes)
    head = ["may end", "ends after", "money", "", *(["g CO2e", ""] if emits else []), f"least {objective}"]
    rows = [head]
    for each in gains:
        row = [f"{seconds_text(each.wait_s)} later" if each.wait_s else "as early as it can"]
        row += [seconds_text(each.measures.end_s), f"{each.measures.cost:.4g}", _change(each.measures.cost, first.cost)]
        if emits:
            row += [f"{each.measures.emissions_g:.4g}", _change(each.measures.emissions_g, first.emissions_g)]
        rows.append([*row, "" if each.least is None else f"{each.least:.4g}"])
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _change(value: float, first: float) -> str:
    return "" if not first or value == first else f"{value / first - 1:+.1%}"


def _ending_by(problem: Problem, due_s: float) -> Problem:
    jobs = (
        replace(job, deadline_s=due_s if job.deadline_s is None else min(job.deadline_s, due_s)) for job in problem.jobs
    )
    return replace(problem, jobs=tuple(jobs))


def _worth(plan: Plan, problem: Problem, objective: str) -> float:
    from ringmaster.tasks.planning.objectives import objective_by_name

    return objective_by_name(objective).value(plan, problem)
