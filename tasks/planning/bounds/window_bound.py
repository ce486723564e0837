"""The lower bound that prices by window of time prove: for jobs that wait, arrive later, and nodes that go away.

Window i lasts from points_s[i] to points_s[i + 1], the last one for ever. Any prices >= 0 prove a bound:

    w_i(s)    worth of a slot of s devices for one second of window i
    l_ji      worth of a second of job j in window i
    f_abi     for a job b that waits for a: the part of l_ai and of l_bi that one second of either earns, not both

Per job and window, the parts that come in (from the jobs that j waits for) and those that go out (to the jobs that wait
for j) are at most l_ji. So the prices of jobs are a flow along chains of jobs that wait for each other. Jobs of a chain
never run at the same time, and none runs before the first one's `head`, the earliest second at which it can start. So
no second of window i earns more than

    sum_{n there} pack_i(G_n)  +  sum_{j: head_j is over} (l_ji - what comes in)                                  rates

where pack_i(G) is the maximum worth of slots that fit G devices together. All jobs together earn at least

    sum_j least_of(j, price_o = min_{i not over at head_j} nodes_o w_i(slot_o) + l_ji)

so no plan ends before the rates have earned that much.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringmaster.tasks.planning.bounds.job_costs import (
    LARGEST,
    LEAST,
    ROUNDING,
    earliest_starts_s,
    least_of,
    pack_of,
    scaling_of,
)
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import Node, PlanningJob, Problem


class Rate(NamedTuple):
    """What may be earned per second from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    worth: float


def window_bound(prices: WindowPrices, problem: Problem) -> float:
    """Returns the seconds before which no plan can end, as the prices prove. Raises ValueError where they are invalid.

    The result is infinite where the nodes go away too early for all work.
    """
    prices = prices.mapped(scaling_of(prices.prices()))
    if faults := list(faults_of(prices, problem)):
        raise ValueError("; ".join(faults))
    cost = math.fsum(costs_of_jobs(prices, problem).values())
    return time_to_earn(cost, list(rates(prices, problem)))


def costs_of_jobs(prices: WindowPrices, problem: Problem) -> dict[str, float]:
    """Returns the least that each job earns, by job id."""
    heads_s = earliest_starts_s(problem)
    return {job.id: _cost_of(job, prices, problem, heads_s[job.id]) for job in problem.jobs}


def faults_of(prices: WindowPrices, problem: Problem) -> Iterator[str]:
    """Yields what is wrong with prices, apart from what they prove."""
    num = len(prices.points_s)
    if problem.is_fused:
        yield "prices by window are for jobs that are trained alone"
    if any(not math.isfinite(number) or number < 0 for number in prices.every()):
        yield "a price is negative or not finite"
        return
    yield from faults_of_points(prices.points_s)
    if not num or prices.points_s[0] != 0.0 or sorted(set(prices.points_s)) != list(prices.points_s):
        yield "the windows must begin at 0 and ascend"
    rows = [prices.slot_prices, *prices.job_prices.values(), *prices.order_prices.values()]
    if any(len(row) != num for row in rows):
        yield f"every price must be given for each of the {num} windows"
        return
    waits = {(other, job.id) for job in problem.jobs for other in job.after}
    if wrong := [pair for pair in prices.order_prices if pair not in waits]:
        yield f"prices of order for {wrong[0][1]!r}, which does not wait for {wrong[0][0]!r}"
    if wrong_jobs := prices.job_prices.keys() - {job.id for job in problem.jobs}:
        yield f"prices of an unknown job {min(wrong_jobs)!r}"
    for job in problem.jobs:
        for i, (own, into, out) in enumerate(_flows(prices, job.id)):
            if max(into, out) > own:
                yield f"prices of order of {job.id} in window {i} exceed its own price"


def faults_of_points(points_s: Sequence[float]) -> Iterator[str]:
    """Yields a fault where windows begin at times that cannot be computed with."""
    if wrong := [point for point in points_s if point and not LEAST <= point <= LARGEST]:
        yield f"a window begins at {wrong[0]:g}; times are 0, or between {LEAST:g} and {LARGEST:g}"


def rates(prices: WindowPrices, problem: Problem) -> Iterator[Rate]:
    """Yields what may be earned by nodes, and by jobs that do not run at the same time as those that they wait for."""
    for _, rate in rates_of_nodes(prices, problem):
        yield rate
    for _, rate in rates_of_jobs(prices, problem):
        yield rate


def rates_of_nodes(prices: WindowPrices, problem: Problem) -> Iterator[tuple[Node, Rate]]:
    """Yields what each node may earn in each window for as long as it is there."""
    ends_s = (*prices.points_s[1:], math.inf)
    for start_s, end_s, typed in zip(prices.points_s, ends_s, prices.slot_prices, strict=True):
        packs = {kind: pack_of(typed.get(kind, {}), problem) for kind in problem.device_types}
        for node in problem.nodes:
            until_s = end_s if node.available_until_s is None else min(end_s, node.available_until_s)
            if until_s > start_s:
                yield node, Rate(start_s, until_s, packs[node.device_type][node.num_devices])


def rates_of_jobs(prices: WindowPrices, problem: Problem) -> Iterator[tuple[str, Rate]]:
    """Yields what each job may earn in each window beside the jobs that it waits for, by job id."""
    ends_s, heads_s = (*prices.points_s[1:], math.inf), earliest_starts_s(problem)
    for job in prices.job_prices:
        for start_s, end_s, (own, into, _) in zip(prices.points_s, ends_s, _flows(prices, job), strict=True):
            if end_s > heads_s[job]:
                yield job, Rate(max(start_s, heads_s[job]), end_s, own - into)


def prices_of_seconds(prices: WindowPrices, job: PlanningJob, problem: Problem, window: int) -> list[float]:
    """Returns the worth of a second of a job in a window under each of its options, on the cheapest type of nodes."""
    typed, own = prices.slot_prices[window], prices.job_prices.get(job.id)
    price = own[window] if own else 0.0
    return [
        o.num_nodes
        * min(typed.get(kind, {}).get(o.slot, 0.0) for kind in problem.device_types if o.device_type in ("", kind))
        + price
        for o in job.options
    ]


def time_to_earn(cost: float, rates: Sequence[Rate]) -> float:
    """Returns the least time by which the rates have earned the cost; infinite where they never do.

    The rest of a cost of which most is earned may have few digits left, so that it is rounded down.
    """
    usable = [rate for rate in rates if rate.worth > 0]
    times = sorted({0.0, *(rate.start_s for rate in usable), *(rate.end_s for rate in usable if rate.end_s < math.inf)})
    earned = 0.0
    for now_s, next_s in zip(times, [*times[1:], math.inf], strict=True):
        missing = cost - earned - (ROUNDING * cost if earned else 0.0)
        if missing <= 1e-9 * cost:
            return now_s
        per_second = math.fsum(rate.worth for rate in usable if rate.start_s <= now_s < rate.end_s)
        if per_second * (next_s - now_s) >= missing:
            return now_s + missing / per_second
        earned += per_second * (next_s - now_s) if per_second else 0.0
    return math.inf


def _cost_of(job: PlanningJob, prices: WindowPrices, problem: Problem, head_s: float) -> float:
    ends_s = (*prices.points_s[1:], math.inf)
    columns = (prices_of_seconds(prices, job, problem, i) for i, end_s in enumerate(ends_s) if end_s > head_s)
    return least_of(job, [min(row) for row in zip(*columns, strict=True)], problem.switch_cost_s)


def _flows(prices: WindowPrices, job: str) -> Iterator[tuple[float, float, float]]:
    """Yields a job's price in each window, what comes in from jobs that it waits for, and what goes out."""
    num = len(prices.points_s)
    into = [row for (_, after), row in prices.order_prices.items() if after == job]
    out = [row for (before, _), row in prices.order_prices.items() if before == job]
    own = prices.job_prices.get(job, (0.0,) * num)
    for i in range(num):
        yield own[i], math.fsum(row[i] for row in into), math.fsum(row[i] for row in out)
