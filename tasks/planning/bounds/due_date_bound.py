"""The lower bound on the largest of factor x end that prices by window between due dates prove.

In a plan of value v, each job j ends by its due date v due_j, with due_j = 1 / factor_j. Window i lasts from v u_i to
v u_(i+1), the last one until the latest due date. Any prices w_i(s) >= 0 of a slot of s devices, and l_ji >= 0 of a
second of job j in window i, prove a bound. The windows earn at most

    E(v)  =  sum_i (sum_n pack_i(G_n) |i before until_n|  +  sum_{j: u_i < due_j} l_ji |i after head_j|)

since a job runs only between its head, the earliest second at which it can start, and its due date. All jobs earn at
least

    S(v)  =  sum_j least_of(j, price_o = min_{i: u_i < due_j, i is not over at head_j} nodes_o w_i(slot_o) + l_ji)

E is linear in v and S constant between the values at which a window begins or ends at some head or until. So no plan
has a value below the least v with E(v) >= S(v).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from ringmaster.tasks.planning.bounds.job_costs import (
    ROUNDING,
    earliest_starts_s,
    in_order,
    least_of,
    pack_of,
    scaling_of,
)
from ringmaster.tasks.planning.bounds.window_bound import faults_of_points, prices_of_seconds
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import Node, PlanningJob, Problem

SAME = 1e-9  # relative difference of sums that is rounding


def due_bound(prices: WindowPrices, problem: Problem, latest: Mapping[str, float]) -> float:
    """Returns a value that the largest of factor x end is never below. Raises ValueError where the prices are invalid.

    prices: `points_s` are the u_i, which begin at 0.
    latest: the factors, by job.
    """
    prices = prices.mapped(scaling_of(prices.prices()))
    if faults := list(_faults(prices, problem)):
        raise ValueError("; ".join(faults))
    books = _Books(prices, problem, dues_of(problem, latest))
    for begin, end in pairwise([0.0, *books.breaks(), math.inf]):
        further = end if end < math.inf else 2.0 * begin + 1.0
        earned, spent = books.earned(begin), books.spent((begin + further) / 2)
        if spent == math.inf:  # some job cannot run at all in a plan of such a value
            continue
        if spent - earned <= SAME * spent:
            return begin
        slope = (books.earned(further) - earned) / (further - begin)
        if slope > 0 and begin + (spent - earned) / slope <= end:
            return begin + (spent - earned) / slope
    return math.inf


class _Books:
    """What the windows earn at a value of the plan, and what the jobs must earn."""

    def __init__(self, prices: WindowPrices, problem: Problem, dues: Mapping[str, float]) -> None:
        self.prices, self.dues, self.heads_s = prices, dues, earliest_starts_s(problem)
        end = max(dues.values(), default=0.0)
        self.begins = [point for point in prices.points_s if point < end]
        self.ends = [*self.begins[1:], end]
        self.groups = Counter((n.device_type, n.num_devices, _until_s(n)) for n in problem.nodes)
        slots = prices.slot_prices[: len(self.begins)]
        self.packs = [{kind: pack_of(typed.get(kind, {}), problem) for kind in problem.device_types} for typed in slots]
        self.costs = {job.id: self._costs_of(job, problem) for job in problem.jobs if job.id in dues}

    def breaks(self) -> list[float]:
        """Returns the values at which a window begins or ends when a job can start or a node leaves."""
        seconds = {*(self.heads_s[job] for job in self.dues), *(until_s for _, _, until_s in self.groups)}
        points = {*self.begins, *self.ends} - {0.0}
        return sorted({s / point for s in seconds if 0 < s < math.inf for point in points})

    def earned(self, value: float) -> float:
        """Returns the most that all windows earn in a plan of this value, rounded up."""
        total = whole = 0.0
        for begin, end, packs in zip(self.begins, self.ends, self.packs, strict=True):
            for (kind, size, until_s), count in self.groups.items():
                worth = count * packs[kind][size]
                total += worth * max(0.0, min(value * end, until_s) - value * begin)
                whole += worth * value * end
        for job, row in self.prices.job_prices.items():
            for begin, end, price in zip(self.begins, self.ends, row, strict=False):
                if begin < self.dues.get(job, 0.0):
                    total += price * max(0.0, value * end - max(value * begin, self.heads_s[job]))
                    whole += price * value * end
        return total + ROUNDING * whole

    def spent(self, value: float) -> float:
        """Returns the least that all jobs earn in a plan of this value; infinite where one cannot run at all."""
        firsts = {job: sum(value * end <= self.heads_s[job] for end in self.ends) for job in self.costs}
        return math.fsum(costs[firsts[job]] for job, costs in self.costs.items())

    def _costs_of(self, job: PlanningJob, problem: Problem) -> list[float]:
        """Returns the least that a job earns in the windows from each one on, until its due date."""
        costs, rows = [math.inf] * (len(self.begins) + 1), list[list[float]]()
        for i in reversed([i for i, begin in enumerate(self.begins) if begin < self.dues[job.id]]):
            rows = [
                [min(column) for column in zip(*rows, prices_of_seconds(self.prices, job, problem, i), strict=True)]
            ]
            costs[i] = least_of(job, rows[0], problem.switch_cost_s)
        return costs


def _until_s(node: Node) -> float:
    return math.inf if node.available_until_s is None else node.available_until_s


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
    yield from faults_of_points(prices.points_s)
    if not num or prices.points_s[0] != 0.0 or sorted(set(prices.points_s)) != list(prices.points_s):
        yield "the windows must begin at 0 and ascend"
    elif any(len(row) != num for row in (prices.slot_prices, *prices.job_prices.values())):
        yield f"every price must be given for each of the {num} windows"
    if prices.order_prices:
        yield "prices of order are no part of prices by due date"
