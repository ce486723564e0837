"""Plans by the hour's prices and carbon measured: certified gaps, and savings against plans that ignore the hours.

`python -m benchmarks.planning --only tariffs` draws thirty jobs on 32 devices, whose least work is about a third of the
day, all due after 24 hours, and writes the section `tariffs` of docs/benchmarks.md.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date

from benchmarks.page import write_section
from benchmarks.planning.families import draw
from ringmaster.features.tariffs.tariff_values import measures_of
from ringmaster.tasks.planning import Plan, Problem, solve, verify

HOUR_S = 3600.0
WORK_S = 5.0
NUM_DRAWS = 20
POWER_W = 700.0  # of one device
SHORTER = 0.5  # factor of the runtimes of the family

PRICES_PER_MWH = (32, 30, 29, 28, 29, 33, 41, 46, 38, 26, 18, 14, 13, 13, 15, 19, 27, 42, 61, 66, 58, 48, 40, 35)
"""Dollars by hour of the day: a rounded shape after the day-ahead prices of California's grid (CAISO) on a sunny spring
day, low at noon and high in the evening. These are no quoted values."""
GRAMS_PER_KWH = (
    392, 392, 401, 396, 398, 385, 355, 312, 280, 250, 234, 224, 230, 243, 261, 309, 366, 395, 410, 401, 384, 366, 334,
    333,
)  # fmt: skip
"""Grams of CO2 equivalents by hour (UTC) in Germany on 2 June 2021, rounded: Electricity Maps, as in the sample trace
of github.com/umass-solar/carbon-aware-dag."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One curve: what it is, the objective, and the measure that the objective is in."""

    name: str
    objective: str
    attribute: str
    steps: tuple[tuple[float, float], ...]


CASES = (
    Case(
        name="prices (CAISO-like)",
        objective="cost",
        attribute="energy_price_steps",
        steps=tuple((hour * HOUR_S, price / 1000) for hour, price in enumerate(PRICES_PER_MWH)),
    ),
    Case(
        name="carbon (Germany, 2 June 2021)",
        objective="emissions",
        attribute="carbon_steps",
        steps=tuple((hour * HOUR_S, float(grams)) for hour, grams in enumerate(GRAMS_PER_KWH)),
    ),
)


def problem_of(case: Case, seed: int) -> Problem:
    """Returns the problem of a draw."""
    drawn = draw("scale-30x32", seed=seed)
    nodes = tuple(replace(node, power_w=POWER_W, **{case.attribute: case.steps}) for node in drawn.nodes)
    jobs = tuple(
        replace(
            job,
            deadline_s=24 * HOUR_S,
            options=tuple(replace(option, runtime_s=SHORTER * option.runtime_s) for option in job.options),
        )
        for job in drawn.jobs
    )
    return replace(drawn, nodes=nodes, jobs=jobs)


def taken(plan: Plan, problem: Problem, case: Case) -> float:
    measures = measures_of(plan, problem)
    return measures.cost if case.objective == "cost" else measures.emissions_g


def at_mean(problem: Problem, case: Case) -> Problem:
    """Returns the problem with the mean of its curve at every hour."""
    mean = statistics.mean(value for _, value in case.steps)
    return replace(problem, nodes=tuple(replace(n, **{case.attribute: ((0.0, mean),)}) for n in problem.nodes))


def row(case: Case, *, num_draws: int) -> str:
    gaps, processors, of_makespan, of_mean, pauses = [], [], [], [], []
    for seed in range(num_draws):
        problem = problem_of(case, seed)
        began_s = time.process_time()
        plan = solve(problem, objective=case.objective, work_s=WORK_S, seed=seed)
        processors.append(time.process_time() - began_s)
        if faults := verify(plan, problem):
            raise SystemExit(f"{problem.name}: {faults[:3]}")
        gaps.append(100 * plan.gap)
        pauses.append(plan.num_switches / len(problem.jobs))
        soonest = solve(problem, work_s=1.0, seed=seed)
        cheapest = solve(at_mean(problem, case), objective=case.objective, work_s=1.0, seed=seed)
        of_makespan.append(100 * (1 - plan.value / taken(soonest, problem, case)))
        of_mean.append(100 * (1 - plan.value / taken(cheapest, problem, case)))
        print(f"{case.name} {seed}: gap {gaps[-1]:.2f} %, saved {of_makespan[-1]:.0f}, {of_mean[-1]:.0f} %", flush=True)
    return (
        f"| {case.name} | {num_draws} | {statistics.mean(gaps):.2f} % | {max(gaps):.2f} % | "
        f"{statistics.mean(processors):.1f} | {statistics.mean(pauses):.1f} | "
        f"{statistics.mean(of_makespan):.0f} % | {statistics.mean(of_mean):.0f} % |"
    )


def lines(rows: list[str], *, num_draws: int) -> Iterator[str]:
    yield f"`python -m benchmarks.planning --only tariffs`, {date.today().isoformat()}, {num_draws} draws of 30 jobs on"
    yield "32 devices over 24 hours, 5 s of work: certified gap, CPU seconds, switches a job, and what is saved against"
    yield "the plan that ends soonest, and against the cheapest one that is found at the curve's mean:"
    yield ""
    yield "| curve | drawn | gap | worst | CPU s | switches | saved: soonest | cheapest at the mean |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    yield from rows


def main(*, num_draws: int = NUM_DRAWS) -> None:
    """Measures all curves, and writes their section."""
    for case in CASES:  # compile the kernels, or load them, before timing
        solve(problem_of(case, 0), objective=case.objective, work_s=0.1)
    write_section("tariffs", list(lines([row(case, num_draws=num_draws) for case in CASES], num_draws=num_draws)))
