"""Plans by the hour's prices and carbon measured: certified gaps, and savings against plans that ignore the hours.

`python -m benchmarks.planning --only tariffs` draws thirty jobs on 32 devices, whose least work is about a third of the
day, all due after 24 hours, and writes the section `tariffs` of docs/benchmarks.md.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache

from benchmarks.page import write_section
from benchmarks.planning.families import draw
from benchmarks.planning.problems import fused
from ringmaster.features.tariffs.tariff_values import Measures, measures_of
from ringmaster.tasks.planning import Plan, PlanningNode, Problem, solve, verify

HOUR_S, DAY_S = 3600.0, 86_400.0
WORK_S = 5.0
NUM_DRAWS = 20
POWER_W = 700.0  # of one device
SHARE_OF_WORK = 1 / 3  # of all device-seconds of the day, that jobs take at least, about

Steps = tuple[tuple[float, float], ...]

EUR_PER_MWH = (
    115.54, 99.98, 92.51, 72.85, 67.87, 68.59, 76.39, 93.02, 98.35, 82.40, 73.44, 39.82,
    18.58, 19.42, 21.68, 40.64, 22.00, 60.33, 94.94, 105.30, 118.67, 123.08, 122.03, 114.95,
)  # fmt: skip
"""Day-ahead prices in Belgium on 5 July 2023 by hour: ENTSO-E's Transparency Platform, as in the file DAM_prices.csv of
github.com/RigauxBaptiste/The_Proof_of_the_Pudding_is_in_the_Heating, times 1000."""
GRAMS_PER_KWH = (
    392, 392, 401, 396, 398, 385, 355, 312, 280, 250, 234, 224, 230, 243, 261, 309, 366, 395, 410, 401, 384, 366, 334,
    333,
)  # fmt: skip
"""Grams of CO2 equivalents by hour (UTC) in Germany on 2 June 2021, rounded: Electricity Maps, as in the sample trace
of github.com/umass-solar/carbon-aware-dag."""


def by_hour(values: Sequence[float], *, factor: float = 1.0) -> Steps:
    return tuple((hour * HOUR_S, factor * value) for hour, value in enumerate(values))


PRICES, CARBON = by_hour(EUR_PER_MWH, factor=1e-3), by_hour(GRAMS_PER_KWH)  # EUR and grams a kWh
SPOT_END_S, SPOT_SHARE = 14 * HOUR_S, 0.4  # when the second half of the nodes goes away, and what it costs until then


def priced(problem: Problem, *, prices: Steps = PRICES, carbon: Steps = CARBON) -> Problem:
    """Returns a problem with both curves, of which the jobs take the usual share of the day and are due at its end."""
    least_s = sum(min(o.num_devices * o.runtime_s for o in job.options) for job in problem.jobs) / problem.num_devices
    factor = SHARE_OF_WORK * DAY_S / least_s
    nodes = tuple(
        replace(node, power_w=POWER_W, energy_price_steps=prices, carbon_steps=carbon) for node in problem.nodes
    )
    jobs = tuple(
        replace(job, deadline_s=DAY_S, options=tuple(replace(o, runtime_s=factor * o.runtime_s) for o in job.options))
        for job in problem.jobs
    )
    return replace(problem, nodes=nodes, jobs=jobs)


@cache
def usual(seed: int) -> Problem:
    return priced(draw("scale-30x32", seed=seed))


@cache
def soonest(seed: int) -> Measures:
    """Returns what the plan takes that ends as early as it can."""
    return measures_of(solve(usual(seed), work_s=1.0, seed=seed), usual(seed))


def with_spot_nodes(seed: int) -> Problem:
    problem = usual(seed)
    half = len(problem.nodes) // 2
    cheap = tuple((start_s, SPOT_SHARE * value) for start_s, value in PRICES)

    def changed(node: PlanningNode) -> PlanningNode:
        return replace(node, energy_price_steps=cheap, available_until_s=SPOT_END_S)

    return replace(problem, nodes=(*problem.nodes[:half], *map(changed, problem.nodes[half:])))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row: problems by seed, and the objective. `curve`: what savings are measured of."""

    name: str
    objective: str
    make: Callable[[int], Problem] = usual
    curve: str = ""
    work_s: float = WORK_S
    max_draws: int = NUM_DRAWS


CASES = (
    Case(name="money", objective="cost", curve="energy_price_steps"),
    Case(name="emissions", objective="emissions", curve="carbon_steps"),
    Case(
        name="money, and at most 70 % of the emissions of the plan that ends soonest",
        objective="cost",
        make=lambda seed: replace(usual(seed), budgets={"emissions": 0.7 * soonest(seed).emissions_g}),
    ),
    Case(
        name="the end, and at most 60 % of its money",
        objective="trade-off",
        make=lambda seed: replace(usual(seed), budgets={"cost": 0.6 * soonest(seed).cost}, factors={"end": 1.0}),
    ),
    Case(
        name="money and the end, which weighs a third of its money",
        objective="trade-off",
        make=lambda seed: replace(
            usual(seed), factors={"cost": 1.0, "end": soonest(seed).cost / soonest(seed).end_s / 3}
        ),
    ),
    Case(name="money, half of the nodes cheaper and there for 14 hours", objective="cost", make=with_spot_nodes),
    Case(
        name="money, 12 jobs on 8 devices that may be fused",
        objective="cost",
        make=lambda seed: priced(fused("paper-txt")(seed, 60.0)),
    ),
    Case(
        name="money, 300 jobs on 128 devices, 10 s of work",
        objective="cost",
        make=lambda seed: priced(draw("scale-300x128", seed=seed)),
        work_s=10.0,
        max_draws=3,
    ),
)


def taken(plan: Plan, problem: Problem, case: Case) -> float:
    return measures_of(plan, problem).of(case.objective)


def at_mean(problem: Problem, case: Case) -> Problem:
    """Returns the problem with the mean of its curve at every hour."""
    mean = statistics.mean(value for _, value in getattr(problem.nodes[0], case.curve))
    return replace(problem, nodes=tuple(replace(n, **{case.curve: ((0.0, mean),)}) for n in problem.nodes))


def row(case: Case, *, num_draws: int) -> str:
    gaps, processors, of_makespan, of_mean, pauses = [], [], [], [], []
    num_draws = min(num_draws, case.max_draws)
    for seed in range(num_draws):
        problem = case.make(seed)
        began_s = time.process_time()
        plan = solve(problem, objective=case.objective, work_s=case.work_s, seed=seed)
        processors.append(time.process_time() - began_s)
        if faults := verify(plan, problem):
            raise SystemExit(f"{problem.name}: {faults[:3]}")
        gaps.append(100 * plan.gap)
        pauses.append(plan.num_switches / len(problem.jobs))
        print(f"{case.name} {seed}: gap {gaps[-1]:.2f} %", flush=True)
        if case.curve:
            cheapest = solve(at_mean(problem, case), objective=case.objective, work_s=1.0, seed=seed)
            of_makespan.append(100 * (1 - plan.value / soonest(seed).of(case.objective)))
            of_mean.append(100 * (1 - plan.value / taken(cheapest, problem, case)))
    cells = [case.name, str(num_draws), f"{statistics.mean(gaps):.2f} %", f"{max(gaps):.2f} %"]
    cells += [f"{statistics.mean(processors):.1f}", f"{statistics.mean(pauses):.1f}"]
    return "| " + " | ".join([*cells, _share(of_makespan), _share(of_mean)]) + " |"


def _share(shares: list[float]) -> str:
    return f"{statistics.mean(shares):.0f} %" if shares else ""


def lines(rows: list[str], *, num_draws: int) -> Iterator[str]:
    command = "python -m benchmarks.planning --only tariffs"
    command += "" if num_draws == NUM_DRAWS else f" --seeds {num_draws}"
    yield f"`{command}`, {date.today().isoformat()}: draws of 30 jobs on 32 devices over 24 hours, {WORK_S:g} s of"
    yield "work. Certified gap, CPU seconds, switches a job, and what is saved against the plan that ends soonest, and"
    yield "against the cheapest one that is found at the curve's mean:"
    yield ""
    yield "| minimised | drawn | gap | worst | CPU s | switches | saved: soonest | cheapest at the mean |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    yield from rows


def main(*, num_draws: int = NUM_DRAWS) -> None:
    """Measures all rows, and writes their section."""
    solve(usual(0), objective="cost", work_s=0.1)  # compile the kernels, or load them, before timing
    write_section("tariffs", list(lines([row(case, num_draws=num_draws) for case in CASES], num_draws=num_draws)))
