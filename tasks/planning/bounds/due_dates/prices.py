"""The lower bound on the largest of factor x end that prices by window between due dates prove.

In a plan of value v, each job j ends by its due date v due_j, with due_j = 1 / factor_j. Window i lasts from v u_i to
v u_(i+1), the last one until the latest due date. Any prices w_i(s) >= 0 of a slot of s devices, and l_ji >= 0 of a
second of job j in window i, prove a bound. The windows earn at most

    v sum_i (u_(i+1) - u_i) (sum_n pack_i(G_n) + sum_{j: u_i < due_j} l_ji)

since no job runs after its due date. Each job earns at least

    least_of(j, price_o = min_{i: u_i < due_j} nodes_o w_i(slot_o) + l_ji)

So v is at least the sum of the latter over the worth of the former at v = 1.
"""

import math
from collections.abc import Iterator, Mapping

from ringmaster.tasks.planning.bounds.job_costs import least_of, pack_of
from ringmaster.tasks.planning.bounds.order import in_order
from ringmaster.tasks.planning.bounds.windows import prices_of_seconds
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem


def due_bound(prices: WindowPrices, problem: Problem, latest: Mapping[str, float]) -> float:
    """Returns a value that the largest of factor x end is never below. Raises ValueError where the prices are invalid.

    prices: `points_s` are the u_i, which begin at 0.
    latest: the factors, by job.
    """
    if faults := list(_faults(prices, problem)):
        raise ValueError("; ".join(faults))
    dues = dues_of(problem, latest)
    jobs = [job for job in problem.jobs if job.id in dues]
    begins = [point for point in prices.points_s if point < max(dues.values(), default=0.0)]
    earned, spent = 0.0, 0.0
    for i, (begin, end) in enumerate(zip(begins, [*begins[1:], max(dues.values(), default=0.0)], strict=True)):
        packs = {kind: pack_of(prices.slot_prices[i].get(kind, {}), problem) for kind in problem.device_types}
        worth = math.fsum(packs[node.device_type][node.num_devices] for node in problem.nodes)
        worth += math.fsum(prices.job_prices[j.id][i] for j in jobs if j.id in prices.job_prices and begin < dues[j.id])
        earned += (end - begin) * worth
    for job in jobs:
        windows = (i for i, begin in enumerate(begins) if begin < dues[job.id])
        rows = (prices_of_seconds(prices, job, problem, i) for i in windows)
        spent += least_of(job, [min(row) for row in zip(*rows, strict=True)], problem.switch_cost_s)
    return spent / earned if earned else 0.0


def dues_of(problem: Problem, latest: Mapping[str, float]) -> dict[str, float]:
    """Returns the due date of each job that has one, at a value of 1."""
    return {job: 1.0 / factor for job, factor in factors_of(problem, latest).items() if factor > 0}


def factors_of(problem: Problem, latest: Mapping[str, float]) -> dict[str, float]:
    """Returns the factor of each job: its own, or the largest of those that wait for it, which end after it."""
    factors = {job.id: latest.get(job.id, 0.0) for job in problem.jobs}
    for job in reversed(list(in_order(problem))):
        for other in job.after:
            factors[other] = max(factors[other], factors[job.id])
    return factors


def _faults(prices: WindowPrices, problem: Problem) -> Iterator[str]:
    num = len(prices.points_s)
    if problem.is_fused:
        yield "prices by due date are for jobs that are trained alone"
    if any(not math.isfinite(number) or number < 0 for number in prices.every()):
        yield "a price is negative or not finite"
    elif not num or prices.points_s[0] != 0.0 or sorted(set(prices.points_s)) != list(prices.points_s):
        yield "the windows must begin at 0 and ascend"
    if any(len(row) != num for row in (prices.slot_prices, *prices.job_prices.values())):
        yield f"every price must be given for each of the {num} windows"
    if prices.order_prices:
        yield "prices of order are no part of prices by due date"
