"""Mean completion and fairness of plans compared with those of schedulers that reassign the devices in rounds.

usage: python -m benchmarks.planning.schedulers [--draws N] [--no-table]

Writes the table between its markers in docs/benchmarks.md. The independent verifier checks every plan.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from random import Random

from benchmarks.page import write_section
from benchmarks.planning.families import draw
from benchmarks.planning.rounds import RULES, played
from ringmaster.tasks.planning import Plan, Problem, solve, verify
from ringmaster.tasks.planning.objectives import objective_by_name

FAMILIES, USERS = ("gavel-24x8", "gavel-24x16"), ("ana", "ben", "eve", "kim")
OBJECTIVES = ("mean_completion", "fairness")
OURS = "Ringmaster, for "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5, help="draws of each kind of problems")
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    lines = []
    for family in FAMILIES:
        lines += rows_of(family, [measured(family, seed=seed) for seed in range(arguments.draws)])
    print("\n".join(lines))
    if not arguments.no_table:
        write_page(lines, num_draws=arguments.draws)


def with_users(problem: Problem, *, seed: int) -> Problem:
    """Returns the problem with each job given to one of four users at random."""
    random = Random(f"users/{seed}")
    return replace(problem, jobs=tuple(replace(job, user=random.choice(USERS)) for job in problem.jobs))


def measured(family: str, *, seed: int) -> dict[str, dict[str, float]]:
    """Returns the figures of each planner on one draw."""
    problem = with_users(draw(family, seed=seed), seed=seed)
    plans = {OURS + name.replace("_", " "): solve(problem, objective=name, seed=seed) for name in OBJECTIVES}
    bounds = {plan.objective: plan.value_bound or 0.0 for plan in plans.values()}
    plans |= {name: played(problem, rule, name=name) for name, rule in RULES.items()}
    return {name: _measured(problem, plan, bounds) for name, plan in plans.items()}


def rows_of(family: str, draws: Sequence[dict[str, dict[str, float]]]) -> list[str]:
    """Returns the rows of the table for one kind of problems."""
    return [_line(family, name, [found[name] for found in draws]) for name in draws[0]]


def _measured(problem: Problem, plan: Plan, bounds: dict[str, float]) -> dict[str, float]:
    if faults := verify(plan, problem):
        raise SystemExit(f"{problem.name}, {plan.method}: {faults[:3]}")
    values = {name: objective_by_name(name).value(plan, problem) for name in OBJECTIVES}
    above = {f"{name} over its bound": values[name] / bounds[name] for name in OBJECTIVES}
    return above | {"rho": values["fairness"], "switches": plan.num_switches / len(problem.jobs)}


def _line(family: str, name: str, rows: list[dict[str, float]]) -> str:
    def median(key: str) -> str:
        return f"{statistics.median(row[key] for row in rows):.2f}"

    ratios = [f"{median(f'{name} over its bound')}" for name in OBJECTIVES]
    worst = [f"{max(row[f'{name} over its bound'] for row in rows):.2f}" for name in OBJECTIVES]
    cells = [family, name, ratios[0], worst[0], median("rho"), ratios[1], worst[1], median("switches")]
    return "| " + " | ".join(cells) + " |"


def write_page(lines: list[str], *, num_draws: int) -> None:
    """Writes the table between the markers, and leaves the rest of the page unchanged."""
    body = [
        f"{date.today().isoformat()}, {os.cpu_count()} cores shared with other work; medians and worst of {num_draws}",
        "draws of each kind (jobs x devices), with jobs of four users. Mean completion is over its certified bound,",
        "which no plan is below. Rho is given as it is, and over its bound.",
        "",
        "| problems | planned by | mean completion | worst | largest rho | over its bound | worst | switches a job |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *lines,
    ]
    write_section("schedulers", body)


if __name__ == "__main__":
    main()
