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

Prices of bounds on the last end prove bounds as well. All jobs whose factor is at least f end by value / f, so no value
is below f x the bound on the last end of these jobs alone. These bounds know of releases, order and leaving nodes;
those by due date know that some jobs end before others. The pattern LP between due dates (`due_prices`) finds prices.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from ringmaster.tasks.planning.bounds import job_costs, windows
from ringmaster.tasks.planning.bounds.bounds import Bound, ValueBound, by_area, certified_bound, preemptive_bound
from ringmaster.tasks.planning.plans.plan import Certificate, WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningJob

SAME = 1e-9  # relative difference of sums that is rounding


def due_bound(prices: WindowPrices, problem: Problem, latest: Mapping[str, float]) -> float:
    """Returns a value that the largest of factor x end is never below. Raises ValueError where the prices are invalid.

    prices: `points_s` are the u_i, which begin at 0.
    latest: the factors, by job.
    """
    prices = prices.mapped(job_costs.scaling_of(prices.prices()))
    if faults := list(_faults(prices, problem)):
        raise ValueError("; ".join(faults))
    books = _WindowAccounts(prices, problem, dues_of(problem, latest))
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


class _WindowAccounts:
    """What the windows earn at a value of the plan, and what the jobs must earn."""

    def __init__(self, prices: WindowPrices, problem: Problem, dues: Mapping[str, float]) -> None:
        self.prices, self.dues, self.heads_s = prices, dues, job_costs.earliest_starts_s(problem)
        end = max(dues.values(), default=0.0)
        self.begins = [point for point in prices.points_s if point < end]
        self.ends = [*self.begins[1:], end]
        ends_s = [math.inf if node.available_until_s is None else node.available_until_s for node in problem.nodes]
        self.groups = Counter(
            (n.device_type, n.num_devices, end_s) for n, end_s in zip(problem.nodes, ends_s, strict=True)
        )
        slots = prices.slot_prices[: len(self.begins)]
        self.packs = [
            {kind: job_costs.pack_of(typed.get(kind, {}), problem) for kind in problem.device_types} for typed in slots
        ]
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
        return total + job_costs.ROUNDING * whole

    def spent(self, value: float) -> float:
        """Returns the least that all jobs earn in a plan of this value; infinite where one cannot run at all."""
        firsts = {job: sum(value * end <= self.heads_s[job] for end in self.ends) for job in self.costs}
        return math.fsum(costs[firsts[job]] for job, costs in self.costs.items())

    def _costs_of(self, job: PlanningJob, problem: Problem) -> list[float]:
        """Returns the least that a job earns in the windows from each one on, until its due date."""
        costs, rows = [math.inf] * (len(self.begins) + 1), list[list[float]]()
        for i in reversed([i for i, begin in enumerate(self.begins) if begin < self.dues[job.id]]):
            rows = [
                [
                    min(column)
                    for column in zip(*rows, windows.prices_of_seconds(self.prices, job, problem, i), strict=True)
                ]
            ]
            costs[i] = job_costs.least_of(job, rows[0], problem.switch_cost_s)
        return costs


def dues_of(problem: Problem, latest: Mapping[str, float]) -> dict[str, float]:
    """Returns the due date of each job that has one, at a value of 1."""
    return {job: 1.0 / factor for job, factor in factors_of(problem, latest).items() if factor > 0}


def factors_of(problem: Problem, latest: Mapping[str, float]) -> dict[str, float]:
    """Returns the factor of each job: its own, or the largest of those that wait for it, which end after it."""
    factors = {job.id: latest.get(job.id, 0.0) for job in problem.jobs}
    for job in reversed(problem.in_order):
        for other in job.after:
            factors[other] = max(factors[other], factors[job.id])
    return factors


def _faults(prices: WindowPrices, problem: Problem) -> Iterator[str]:
    yield from windows.faults_of_numbers(prices, problem)
    if prices.order_prices:
        yield "prices of order are not part of prices by due date"


MAX_LPS = 12
FIRST_STEP, MIN_STEP = 0.04, 2e-3  # shares by which a supposed value is above the bound
MAX_WINDOWS = 16
MAX_SIZE = 1_500  # limit of windows x jobs: about a second
MAX_SETS = 16  # of jobs that are bounded, evenly chosen where there are more different factors


def latest_bound(
    problem: Problem, latest: Mapping[str, float], *, bound_s: float, certificate: Certificate | None = None
) -> float:
    """Returns a value that the largest of factor x end is never below, by arithmetic alone.

    latest: the factors, by job.
    bound_s: a lower bound on the last end of all jobs.
    certificate: prices that prove more; prices by area are always tried.

    Raises ValueError where a price is invalid.
    """
    factors, ends_s = factors_of(problem, latest), job_costs.earliest_ends_s(problem)
    least = max(min(factors.values()) * bound_s, *(factor * ends_s[job] for job, factor in factors.items()))
    by_due = certificate.due if certificate else None
    if by_due is not None:
        return max(least, due_bound(by_due, problem, latest))
    for factor, part in parts_of(problem, latest):
        names = {job.id for job in part.jobs}
        tried = [by_area(part), *([certificate.only(names)] if certificate else [])]
        least = max([least, *(factor * certified_bound(each, part) for each in tried)])
    return least


def best_latest_bound(problem: Problem, latest: Mapping[str, float], bound: Bound) -> ValueBound:
    """Returns the best lower bound on the largest of factor x end, with the certificate that proves most of it.

    bound: on the last end of all jobs.
    """
    tried = [bound.certificate]
    if len(set(factors_of(problem, latest).values())) > 1:
        if windows.has_windows(problem) or problem.is_fused:
            tried += [preemptive_bound(part).certificate for _, part in parts_of(problem, latest)]
        least = latest_bound(problem, latest, bound_s=bound.seconds, certificate=bound.certificate)
        if 0 < least < math.inf and not problem.is_fused:
            by_due = due_prices(problem, latest, least=least)
            tried.append(Certificate(due=by_due) if by_due else None)
    bounds = [
        ValueBound(latest_bound(problem, latest, bound_s=bound.seconds, certificate=each), each) for each in tried
    ]
    return max(bounds, key=lambda each: each.value)


def parts_of(problem: Problem, latest: Mapping[str, float]) -> Iterator[tuple[float, Problem]]:
    """Yields factors, each with the jobs whose factor is at least that, if there are several different ones."""
    factors = factors_of(problem, latest)
    different = sorted({factor for factor in factors.values() if factor > 0}, reverse=True)
    if len(set(factors.values())) > 1:
        for factor in windows.evenly(different, MAX_SETS):
            yield factor, job_costs.only(problem, {job for job, own in factors.items() if own >= factor})


def due_prices(problem: Problem, latest: Mapping[str, float], *, least: float) -> WindowPrices | None:
    """Returns the prices that prove most of the largest of factor x end; None where the LPs have no solution.

    Each LP supposes a value. If no plan has that value, its prices prove it, and often a higher one; the next LP
    supposes more. Otherwise, the next one supposes less.

    latest: the factors, by job.
    least: a value that is known to be a lower bound, above 0.
    """
    dues, best, step = dues_of(problem, latest), None, FIRST_STEP
    for _ in range(MAX_LPS):
        value = least * (1 + step)
        prices = _DueModel(problem, dues, _points_of(problem, dues, value), value=value).prices()
        proved = 0.0 if prices is None else due_bound(prices, problem, latest)
        if least * (1 + MIN_STEP / 2) < proved < math.inf:
            best, least = prices, proved
        else:
            step /= 2
        if step < MIN_STEP:
            break
    return best


def _points_of(problem: Problem, dues: Mapping[str, float], value: float) -> tuple[float, ...]:
    """Returns where windows begin: at due dates, and where jobs can start and nodes leave at that value."""
    seconds = {
        *job_costs.earliest_starts_s(problem).values(),
        *(node.available_until_s or 0.0 for node in problem.nodes),
    }
    points = sorted({*dues.values(), *(s / value for s in seconds)} - {0.0})
    most = max(1, min(MAX_WINDOWS, MAX_SIZE // len(problem.jobs)))
    return (0.0, *windows.evenly([point for point in points if point < max(dues.values())], most - 1))


class _DueModel(windows.WindowRows):
    """Maximises the share z of all jobs that is done at a value v, over the seconds x[j,o,i] of (j, o) in window i.

    In addition to the rows of `WindowRows`, the last window of which begins at the last due date:

        work    sum_{o,i} x[j,o,i] / whole[o]  >= z
        time    sum_o x[j,o,i]                 <= length of window i after head[j]        where u[i] < due[j]
    """

    def __init__(self, problem: Problem, dues: Mapping[str, float], points: tuple[float, ...], *, value: float) -> None:
        ends = (*points, max(dues.values()))
        super().__init__(
            problem,
            classes=tuple((j,) for j, job in enumerate(problem.jobs) if job.id in dues),
            points_s=tuple(value * point for point in ends),
            unit_s=value * ends[-1],
            with_end=False,
        )
        self._dues, self._values = dues, points
        self._time: dict[tuple[int, int], int] = {}
        self._done = self.lp.column(cost=-1.0)
        for c in range(len(self.classes)):
            self._add_job(c)
        self.add_nodes()

    def _add_job(self, c: int) -> None:
        work = self.lp.row(0.0, math.inf, [(self._done, -1.0)])
        for i in self.windows[c]:
            if i == self.last or self._values[i] >= self._dues[self.jobs[c].id]:
                continue
            time = self._time[c, i] = self.lp.row(-math.inf, self.points[i + 1] - max(self.points[i], self.heads[c]))
            for option, whole in self.options[c]:
                for slot in self.slot_rows(i, option):
                    self.lp.column([(work, 1.0 / whole), (time, 1.0), slot])

    def prices(self) -> WindowPrices | None:
        duals = self.lp.prices()
        if duals is None:
            return None
        own: dict[str, list[float]] = {}
        for (c, i), row in self._time.items():
            if duals[row] < -1e-12:
                own.setdefault(self.jobs[c].id, [0.0] * self.last)[i] = -duals[row]
        prices = self.window_prices(duals, own)
        return WindowPrices(self._values, prices.slot_prices[: self.last], prices.job_prices)
