"""The least that a job costs at given prices, and the most that the devices of a node earn."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ringmaster.tasks.planning.problems.parts import PlanningJob
from ringmaster.tasks.planning.problems.problem import Problem

LEAST, LARGEST = 1e-100, 1e100
"""Numbers between which sums and products of prices and seconds keep their digits."""
ROUNDING = 1e-12
"""A share of the numbers that a bound is computed from, which exceeds all errors of rounding."""


def scaling_of(prices: Iterable[float]) -> Callable[[float], float]:
    """Returns a function that multiplies a price by a power of two, which makes the largest one about 1.

    Bounds do not depend on the unit of prices. Prices so small that products of them would lose their digits become 0:
    any prices >= 0 prove a bound. Raises ValueError where a price is negative or not finite.
    """
    known = list(prices)
    if any(not math.isfinite(price) or price < 0 for price in known):
        raise ValueError("a price is negative or not finite")
    exponent = -math.frexp(max(known, default=0.0))[1]

    def scaled(price: float) -> float:
        found = math.ldexp(price, exponent)
        return found if found >= LEAST else 0.0

    return scaled


def least_of(job: PlanningJob, prices: Sequence[float], switch_cost_s: float) -> float:
    """Returns the least total worth of a job's seconds, where a second under option o is worth prices[o].

    The cost of a plan is linear in how it divides the work among its segments. So it is cheapest to do all the work in
    one segment; at most one more segment is worth its cost, a last one that evaluates:

        min( min_o price_o (head_o + runtime_o + save_o + evaluate_o),
             min_o price_o (head_o + runtime_o + save_o) + min_o price_o (switch + startup_o + save_o + evaluate_o) )

    head_o is what the job's first segment pays at its start: the start-up, and also the switch cost where the job has
    started before. It is 0 under the option that the job runs under at time 0.
    """
    rows = []
    for k, (price, o) in enumerate(zip(prices, job.options, strict=True)):
        whole_s = whole_of(job, k, switch_cost_s)
        last_s = switch_cost_s + o.startup_s + o.save_s + o.evaluate_s
        rows.append((price * whole_s, price * (whole_s - o.evaluate_s), price * last_s))
    whole, work, last = (min(column) for column in zip(*rows, strict=True))
    return float(min(whole, work + last))


def whole_of(job: PlanningJob, option: int, switch_cost_s: float) -> float:
    """Returns the seconds of a whole job in one segment under the option with that index, including its overhead."""
    chosen = job.options[option]
    if job.running is not None and option == job.running.option:
        return chosen.whole_s - chosen.startup_s
    return chosen.whole_s + (switch_cost_s if job.started else 0.0)


def shortest_of(problem: Problem) -> dict[str, float]:
    """Returns the least seconds of each job from its first start to its end, alone or in a fused group."""
    if not problem.is_fused:
        return {job.id: shortest_s(job, problem.switch_cost_s) for job in problem.jobs}
    shortest: dict[str, float] = {}
    for job in problem.jobs:
        for option in job.options:
            for name in (job.id, *option.jobs):
                shortest[name] = min(option.runtime_s, shortest.get(name, math.inf))
    return {job.id: shortest[job.id] for job in problem.jobs}


def shortest_s(job: PlanningJob, switch_cost_s: float) -> float:
    """Returns the least seconds of a job from its first start to its end."""
    return least_of(job, [1.0] * len(job.options), switch_cost_s)


def pack_of(prices: Mapping[int, float], problem: Problem) -> list[float]:
    """Returns the maximum worth of slots that fit g devices together, for each g."""
    pack = [0.0]
    for size in range(1, max(node.num_devices for node in problem.nodes) + 1):
        fits = (pack[size - slot] + price for slot, price in prices.items() if 0 < slot <= size)
        pack.append(max([pack[-1], *fits]))
    return pack
