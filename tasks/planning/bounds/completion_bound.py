"""The lower bound on the sum of weight x end that prices by window of time prove.

Window i lasts from points_s[i] to points_s[i + 1]; nothing is earned in the last one, which never ends. Any prices >= 0
prove a bound, of which w_i(s), l_ji and the flow of order prices are those of `window_bound`. Further prices are

    W_j    the part of a job's weight that is charged for when it ends
    f_ab   for a job b that waits for a: all seconds of b come between the end of a and its own
    mu_jk  worth of the job's whole work if it ends in window k

Let net_j = weight_j - sum_a f_aj + sum_b f_jb, of which W_j is at most all. As end_b >= end_a + (seconds of b),

    sum_j weight_j end_j  >=  sum_j [ net_j end_j + sum_a f_aj (seconds of j) ]

No job ends before head_j + shortest_j, which bounds (net_j - W_j) end_j. A job that ends in window k does so after all
its seconds in k, so W_j end_j >= W_j (max(points_s[k], head_j) + seconds in k). All its seconds are worth at most what
the windows earn (`window_bound.rates`). So what is left is the least that a job pays if it ends in window k,

    V_j = min_k [ W_j max(points_s[k], head_j) + pay_jk ]
    pay_jk = min over seconds x(o,i), i <= k, of  sum p_oi x(o,i)   where all work is done and sum_o x(o,i) <= len_ji
    p_oi = nodes_o w_i(slot_o) + l_ji + sum_a f_aj, and W_j more in window k;   len_ji = length of i after head_j

which Lagrange's relaxation of the work bounds at any mu_jk >= 0:

    pay_jk >= mu_jk kappa_j - sum_{i <= k} len_ji max(0, max_o mu_jk / whole_o - p_oi)

kappa_j is `least_of` at 1 / whole_o, the least that a job's seconds sum to. The bound is

    sum_j V_j + sum_j (net_j - W_j) (head_j + shortest_j) - (sum of rates x their length)
"""

import math
from collections.abc import Iterator, Mapping

from ringmaster.tasks.planning.bounds.job_costs import (
    LARGEST,
    LEAST,
    ROUNDING,
    earliest_starts_s,
    least_of,
    shortest_s,
    whole_of,
)
from ringmaster.tasks.planning.bounds.window_bound import faults_of as faults_of_windows
from ringmaster.tasks.planning.bounds.window_bound import prices_of_seconds, rates
from ringmaster.tasks.planning.plans.window_prices import CompletionPrices
from ringmaster.tasks.planning.problems.problem import PlanningJob, Problem


def completion_bound(prices: CompletionPrices, problem: Problem, weights: Mapping[str, float]) -> float:
    """Returns a lower bound on the sum of weight x end of any plan. Raises ValueError where prices are invalid."""
    if faults := list(faults_of(prices, problem, weights)):
        raise ValueError("; ".join(faults))
    heads_s, length_s = earliest_starts_s(problem), prices.windows.points_s[-1]
    parts = [-rate.worth * (rate.end_s - rate.start_s) for rate in rates(prices.windows, problem) if rate.worth > 0]
    # What is subtracted may leave little of it: all errors of rounding are less than this share of the numbers.
    parts.append(ROUNDING * math.fsum(parts))
    parts += [-ROUNDING * price * length_s for row in prices.windows.job_prices.values() for price in row]
    for job in problem.jobs:
        own = prices.end_prices.get(job.id, 0.0)
        every = _signed(prices, job, weights)
        least_s = heads_s[job.id] + shortest_s(job, problem.switch_cost_s)
        parts.append((math.fsum(every) - own) * least_s - ROUNDING * (math.fsum(map(abs, every)) + own) * least_s)
        parts.append(_least_pay(prices, job, problem, heads_s[job.id], own))
    return math.fsum(parts)


def kappa_of(job: PlanningJob, problem: Problem) -> float:
    """Returns the least sum of seconds / whole_o of a job: 1, or less where a last segment saves seconds."""
    whole = [whole_of(job, k, problem.switch_cost_s) for k in range(len(job.options))]
    return least_of(job, [1 / seconds for seconds in whole], problem.switch_cost_s)


def can_end_in(window_end_s: float, job: PlanningJob, problem: Problem, head_s: float) -> bool:
    """Whether a job may end in a window that ends then."""
    return window_end_s >= head_s + shortest_s(job, problem.switch_cost_s)


def faults_of(prices: CompletionPrices, problem: Problem, weights: Mapping[str, float]) -> Iterator[str]:
    """Yields what is wrong with prices, apart from what they prove."""
    if any(not math.isfinite(number) or number < 0 for number in (*prices.every(), *weights.values())):
        yield "a price or weight is negative or not finite"
        return
    if wrong_numbers := [number for number in prices.every() if number and not LEAST <= number <= LARGEST]:
        yield f"a price is {wrong_numbers[0]:g}; prices of completions are 0, or between {LEAST:g} and {LARGEST:g}"
        return
    if faults := list(faults_of_windows(prices.windows, problem)):
        yield from faults
        return
    num, own = len(prices.windows.points_s), prices.windows.job_prices.values()
    slots = [price for typed in prices.windows.slot_prices[-1].values() for price in typed.values()]
    if any(row[-1] > 0 for row in own) or any(price > 0 for price in slots):
        yield "the last window has no end, so nothing in it may have a price"
    if any(len(row) != num for row in prices.work_prices.values()):
        yield f"every price of work must be given for each of the {num} windows"
    jobs = {job.id: job for job in problem.jobs}
    if wrong := [b for a, b in prices.wait_prices if b not in jobs or a not in jobs[b].after]:
        yield f"a price of waiting for {wrong[0]!r}, which does not wait for that job"
        return
    if wrong := sorted({*prices.end_prices, *prices.work_prices} - jobs.keys()):
        yield f"prices of an unknown job {wrong[0]!r}"
    for job in problem.jobs:
        if prices.end_prices.get(job.id, 0.0) > math.fsum(_signed(prices, job, weights)):
            yield f"the price of the end of {job.id} exceeds its weight"


def _signed(prices: CompletionPrices, job: PlanningJob, weights: Mapping[str, float]) -> list[float]:
    """Returns the weight of a job, what others pay for waiting for it, and, below 0, what it pays for waiting."""
    out = (price for (a, _), price in prices.wait_prices.items() if a == job.id)
    into = (-price for (_, b), price in prices.wait_prices.items() if b == job.id)
    return [weights.get(job.id, 0.0), *out, *into]


def _least_pay(prices: CompletionPrices, job: PlanningJob, problem: Problem, head_s: float, own: float) -> float:
    """Returns V_j: the least over all windows in which the job may end."""
    points_s = prices.windows.points_s
    ends_s, num = (*points_s[1:], math.inf), len(points_s)
    waits = math.fsum(price for (_, b), price in prices.wait_prices.items() if b == job.id)
    rows = [[p + waits for p in prices_of_seconds(prices.windows, job, problem, i)] for i in range(num)]
    length_s = [max(0.0, end_s - max(point_s, head_s)) for point_s, end_s in zip(points_s, ends_s, strict=True)]
    whole_s = [whole_of(job, k, problem.switch_cost_s) for k in range(len(job.options))]
    work, kappa = prices.work_prices.get(job.id, (0.0,) * num), kappa_of(job, problem)

    def gain(mu: float, row: list[float], further: float) -> float:
        return max(0.0, *(mu / whole - p - further for whole, p in zip(whole_s, row, strict=True)))

    least = math.inf
    for k in range(num):
        if not can_end_in(ends_s[k], job, problem, head_s):
            continue
        mu, last_s = work[k], length_s[k]
        if k == num - 1:  # seconds without limit: mu may not make them worth more than they cost
            mu = min(mu, *(whole * (p + own) for whole, p in zip(whole_s, rows[k], strict=True)))
            last_s = 0.0
        paid = own * max(points_s[k], head_s) + mu * kappa
        pay = paid - last_s * gain(mu, rows[k], own)
        pay -= math.fsum(length_s[i] * gain(mu, rows[i], 0.0) for i in range(k) if length_s[i] > 0)
        # A gain is a difference, which may be rounded to 0 even where it is not.
        most = (last_s + math.fsum(length_s[i] for i in range(k))) * mu / min(whole_s)
        least = min(least, pay - ROUNDING * (paid + most))
    return least
