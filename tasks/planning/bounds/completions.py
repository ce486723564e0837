"""The lower bound on the sum of weight x end that prices by window of time prove.

Window i lasts from points_s[i] to points_s[i + 1]; nothing is earned in the last one, which never ends. Any prices >= 0
prove a bound, of which w_i(s), l_ji and the flow of order prices are those of `windows`. Further prices are

    W_j    the part of a job's weight that is charged for when it ends
    f_ab   for a job b that waits for a: all seconds of b come between the end of a and its own
    mu_jk  worth of the job's whole work if it ends in window k

Let net_j = weight_j - sum_a f_aj + sum_b f_jb, of which W_j is at most all. As end_b >= end_a + (seconds of b),

    sum_j weight_j end_j  >=  sum_j [ net_j end_j + sum_a f_aj (seconds of j) ]

No job ends before head_j + shortest_j, which bounds (net_j - W_j) end_j. A job that ends in window k does so after all
its seconds in k, so W_j end_j >= W_j (max(points_s[k], head_j) + seconds in k). All its seconds are worth at most what
the windows earn (`windows.rates`). So what is left is the least that a job pays if it ends in window k,

    V_j = min_k [ W_j max(points_s[k], head_j) + pay_jk ]
    pay_jk = min over seconds x(o,i), i <= k, of  sum p_oi x(o,i)   where all work is done and sum_o x(o,i) <= len_ji
    p_oi = nodes_o w_i(slot_o) + l_ji + sum_a f_aj, and W_j more in window k;   len_ji = length of i after head_j

which Lagrange's relaxation of the work bounds at any mu_jk >= 0:

    pay_jk >= mu_jk kappa_j - sum_{i <= k} len_ji max(0, max_o mu_jk / whole_o - p_oi)

kappa_j is `least_of` at 1 / whole_o, the least that a job's seconds sum to. The bound is

    sum_j V_j + sum_j (net_j - W_j) (head_j + shortest_j) - (sum of rates x their length)

`CompletionModel` is the LP by windows of time whose dual prices are such prices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ringmaster.tasks.planning.bounds import job_costs
from ringmaster.tasks.planning.bounds.windows import Classes, WindowRows, prices_of_seconds, rates
from ringmaster.tasks.planning.bounds.windows import faults_of as faults_of_windows
from ringmaster.tasks.planning.plans.plan import Certificate, CompletionPrices
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningJob


def completion_bound(prices: CompletionPrices, problem: Problem, weights: Mapping[str, float]) -> float:
    """Returns a lower bound on the sum of weight x end of any plan. Raises ValueError where prices are invalid."""
    if faults := list(faults_of(prices, problem, weights)):
        raise ValueError("; ".join(faults))
    heads_s, length_s = job_costs.earliest_starts_s(problem), prices.windows.points_s[-1]
    parts = [-rate.worth * (rate.end_s - rate.start_s) for rate in rates(prices.windows, problem) if rate.worth > 0]
    # What is subtracted may leave little of it: all errors of rounding are less than this share of the numbers.
    parts.append(job_costs.ROUNDING * math.fsum(parts))
    parts += [-job_costs.ROUNDING * price * length_s for row in prices.windows.job_prices.values() for price in row]
    for job in problem.jobs:
        own = prices.end_prices.get(job.id, 0.0)
        every = _signed(prices, job, weights)
        least_s = heads_s[job.id] + job_costs.shortest_s(job, problem.switch_cost_s)
        parts.append(
            (math.fsum(every) - own) * least_s - job_costs.ROUNDING * (math.fsum(map(abs, every)) + own) * least_s
        )
        parts.append(_least_pay(prices, job, problem, heads_s[job.id], own))
    return math.fsum(parts)


def kappa_of(job: PlanningJob, problem: Problem) -> float:
    """Returns the least sum of seconds / whole_o of a job: 1, or less where a last segment saves seconds."""
    whole = [job_costs.whole_of(job, k, problem.switch_cost_s) for k in range(len(job.options))]
    return job_costs.least_of(job, [1 / seconds for seconds in whole], problem.switch_cost_s)


def can_end_in(window_end_s: float, job: PlanningJob, problem: Problem, head_s: float) -> bool:
    """Whether a job may end in a window that ends then."""
    return window_end_s >= head_s + job_costs.shortest_s(job, problem.switch_cost_s)


def faults_of(prices: CompletionPrices, problem: Problem, weights: Mapping[str, float]) -> Iterator[str]:
    """Yields what is wrong with prices, apart from what they prove."""
    if any(not math.isfinite(number) or number < 0 for number in (*prices.every(), *weights.values())):
        yield "a price or weight is negative or not finite"
        return
    if wrong_numbers := [
        number for number in prices.every() if number and not job_costs.LEAST <= number <= job_costs.LARGEST
    ]:
        least, largest = job_costs.LEAST, job_costs.LARGEST
        yield f"a price is {wrong_numbers[0]:g}; prices of completions are 0, or between {least:g} and {largest:g}"
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
    if wrong := [b for b, by in prices.wait_prices.items() if b not in jobs or not set(jobs[b].after).issuperset(by)]:
        yield f"a price of waiting for {wrong[0]!r}, which does not wait for that job"
        return
    if wrong := sorted({*prices.end_prices, *prices.work_prices} - jobs.keys()):
        yield f"prices of an unknown job {wrong[0]!r}"
    for job in problem.jobs:
        if prices.end_prices.get(job.id, 0.0) > math.fsum(_signed(prices, job, weights)):
            yield f"the price of the end of {job.id} exceeds its weight"


def _signed(prices: CompletionPrices, job: PlanningJob, weights: Mapping[str, float]) -> list[float]:
    """Returns the weight of a job, what others pay for waiting for it, and, below 0, what it pays for waiting."""
    out = (by[job.id] for by in prices.wait_prices.values() if job.id in by)
    into = (-price for price in prices.wait_prices.get(job.id, {}).values())
    return [weights.get(job.id, 0.0), *out, *into]


def _least_pay(prices: CompletionPrices, job: PlanningJob, problem: Problem, head_s: float, own: float) -> float:
    """Returns V_j: the least over all windows in which the job may end."""
    points_s = prices.windows.points_s
    ends_s, num = (*points_s[1:], math.inf), len(points_s)
    waits = math.fsum(prices.wait_prices.get(job.id, {}).values())
    rows = [[p + waits for p in prices_of_seconds(prices.windows, job, problem, i)] for i in range(num)]
    length_s = [max(0.0, end_s - max(point_s, head_s)) for point_s, end_s in zip(points_s, ends_s, strict=True)]
    whole_s = [job_costs.whole_of(job, k, problem.switch_cost_s) for k in range(len(job.options))]
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
        least = min(least, pay - job_costs.ROUNDING * (paid + most))
    return least


NUM_WINDOWS = 17
MAX_SIZE = 3_000  # limit of classes x pairs of windows: about two seconds
MAX_CLASSES = 200
LAST = 1.05  # begin of the last window, as a share of the bound on the last end


def completion_certificate(problem: Problem, weights: Mapping[str, float], *, bound_s: float) -> Certificate | None:
    """Returns prices that prove a bound on the sum of weight x end; None where the LP is too large or finds none.

    bound_s: a lower bound on the last end.
    """
    if not 0 < len(weighted_classes(problem, weights)) <= MAX_CLASSES:
        return None
    points_s = completion_points(problem, weights, end_s=LAST * bound_s)
    prices = CompletionModel(problem, weights, points_s=points_s, unit_s=bound_s).prices()
    if prices is None or next(faults_of(prices, problem, weights), None):
        return None
    return Certificate(completions=prices)


def likely_ends_s(problem: Problem, weights: Mapping[str, float], *, bound_s: float) -> dict[str, float]:
    """Returns when jobs end in the LP that proves the bound, on average over their parts, by job id.

    Jobs without a weight that nobody waits for are left out. Returns {} where the LP is too large or finds nothing.

    bound_s: a lower bound on the last end.
    """
    if not 0 < len(weighted_classes(problem, weights)) <= MAX_CLASSES:
        return {}
    points_s = completion_points(problem, weights, end_s=LAST * bound_s)
    return CompletionModel(problem, weights, points_s=points_s, unit_s=bound_s).ends_s()


def completion_points(problem: Problem, weights: Mapping[str, float], *, end_s: float) -> tuple[float, ...]:
    """Returns where windows begin, in seconds: 0, then more often where more jobs end, and the last one at `end_s`.

    Where jobs end is guessed by Smith's rule on one machine.
    """
    num = NUM_WINDOWS
    while num > 3 and len(problem.classes) * num * num > 2 * MAX_SIZE:
        num -= 1
    area_s = {job.id: job_costs.least_of(job, [float(o.num_devices) for o in job.options], 0.0) for job in problem.jobs}
    ends = list(accumulate(sorted(seconds for job, seconds in area_s.items() if weights.get(job, 0.0) > 0)))
    shares = [k / (num - 1) for k in range(1, num - 1)]
    points = {end_s * (share + ends[int((len(ends) - 1) * share)] / ends[-1]) / 2 for share in shares}
    return (0.0, *sorted(points), end_s)


def weighted_classes(problem: Problem, weights: Mapping[str, float]) -> Classes:
    """Returns the classes of jobs that matter: those with a weight, and those that they wait for."""
    needed: set[str] = set()
    left = [job.id for job in problem.jobs if weights.get(job.id, 0.0) > 0]
    while left:
        if (name := left.pop()) not in needed:
            needed.add(name)
            left += problem.job(name).after
    members_of: dict[tuple[int, float], list[int]] = {}
    for c, members in enumerate(problem.classes):
        for j in members:
            if (name := problem.jobs[j].id) in needed:
                members_of.setdefault((c, weights.get(name, 0.0)), []).append(j)
    return tuple(map(tuple, members_of.values()))


class CompletionModel(WindowRows):
    """The LP that minimises the sum of weight[c] C[c] over C[c], the sum of the ends of the jobs of class c.

    Columns: share[c,k] of class c that ends in window k; x[c,o,i,k] seconds in window i of what ends in k. In addition
    to the rows of `WindowRows`, whose x[c,o,i] are the sum over k:

        all    sum_k share[c,k]  = m[c]
        work   sum_{o,i} x[c,o,i,k] / whole[o]  >= kappa[c] share[c,k]
        time   sum_o x[c,o,i,k]  <= (length of i after head[c]) share[c,k]
        end    C[c]  >= sum_k max(a_k, head[c]) share[c,k] + sum_{o,k} x[c,o,k,k]
        least  C[c]  >= m[c] (head[c] + shortest[c])
        wait   C[c] / m[c]  >= C[a] + sum_{o,i,k} x[c,o,i,k] / m[c]                   for each a that c waits for
    """

    def __init__(
        self, problem: Problem, weights: Mapping[str, float], *, points_s: tuple[float, ...], unit_s: float
    ) -> None:
        classes = weighted_classes(problem, weights)
        super().__init__(problem, classes=classes, points_s=points_s, unit_s=unit_s, with_end=False)
        self.weights = weights
        self.scale = sum(weights.values())
        self._end: list[int] = []
        self._after: dict[tuple[int, int], int] = {}
        self._work: dict[tuple[int, int], int] = {}
        self._completion: list[int] = []
        for c in range(len(classes)):
            self._add_completion(c)
        for c in range(len(classes)):
            self._add_seconds(c)
        self.add_order()
        self.add_nodes()

    def ends_s(self) -> dict[str, float]:
        """Solves the LP and returns the mean end of each class by job id; {} without a solution."""
        values = self.lp.values()
        return {
            self.problem.jobs[j].id: values[self._completion[c]] * self.unit_s / len(members)
            for c, members in enumerate(self.classes)
            for j in (members if values else ())
        }

    def prices(self) -> CompletionPrices | None:
        """Solves the LP and returns its dual prices; None without a solution."""
        duals = self.lp.prices()
        if duals is None:
            return None
        duals = [dual * self.scale for dual in duals]
        names = [[self.problem.jobs[j].id for j in members] for members in self.classes]
        waits = self._wait_prices(duals, names)
        end_prices, work = {}, {}
        for c, members in enumerate(names):
            for name in members:
                into = (-price for price in waits.get(name, {}).values())
                out = (by[name] for by in waits.values() if name in by)
                net = math.fsum((self.weights.get(name, 0.0), *out, *into))
                end_prices[name] = min(max(0.0, duals[self._end[c]]), max(0.0, net))
                work[name] = tuple(
                    self.unit_s * max(0.0, duals[self._work[c, k]]) if (c, k) in self._work else 0.0
                    for k in range(self.num)
                )
        return CompletionPrices(self.window_prices(duals, {}), end_prices, waits, work)

    def _wait_prices(self, duals: Sequence[float], names: Sequence[Sequence[str]]) -> dict[str, dict[str, float]]:
        """Returns the prices of the rows `wait`, scaled down where a job would pay more than it has."""
        waits: dict[str, dict[str, float]] = {}
        for (a, c), row in self._after.items():
            for name in names[c] if duals[row] > 1e-12 else ():
                waits.setdefault(name, {})[self.jobs[a].id] = duals[row] / len(names[c])
        has = {name: self.weights.get(name, 0.0) for members in names for name in members}
        for job in reversed(self.problem.in_order):
            into = waits.get(job.id, {})
            out = math.fsum(by[job.id] for by in waits.values() if job.id in by)
            paid, most = math.fsum(into.values()), (has.get(job.id, 0.0) + out) * (1 - 1e-12)
            if paid > most:
                waits[job.id] = {other: price * most / paid for other, price in into.items()}
        return waits

    def _add_completion(self, c: int) -> None:
        """Adds C[c], share[c,k] and their rows."""
        job, count = self.jobs[c], float(len(self.classes[c]))
        end_s = job_costs.earliest_starts_s(self.problem)[job.id] + job_costs.shortest_s(
            job, self.problem.switch_cost_s
        )
        self._end.append(self.lp.row(0.0, math.inf))
        least = self.lp.row(count * end_s / self.unit_s, math.inf)
        entries = [(self._end[c], 1.0), (least, 1.0)]
        cost = self.weights.get(job.id, 0.0) / self.scale
        self._completion.append(self.lp.column(entries, cost=cost))

    def _add_seconds(self, c: int) -> None:
        job, count = self.jobs[c], len(self.classes[c])
        waits = []
        for other in job.after:
            a = self.class_of[other]
            ends = [(self._completion[c], 1.0 / count), (self._completion[a], -1.0)]
            self._after[a, c] = self.lp.row(0.0, math.inf, ends)
            waits.append((self._after[a, c], -1.0 / count))
        order = {i: self.order_rows(c, i) for i in self.windows[c] if i < self.last and self.is_ordered[c]}
        every, kappa = self.lp.row(float(count), float(count)), kappa_of(job, self.problem)
        ends_s = (*self.points_s[1:], math.inf)
        for k in self.windows[c]:
            if not can_end_in(ends_s[k], job, self.problem, self.heads[c] * self.unit_s):
                continue
            work = self._work[c, k] = self.lp.row(0.0, math.inf)
            begin = max(self.points[k], self.heads[c])
            share = [(every, 1.0), (work, -kappa), (self._end[c], -begin)]
            for i in (i for i in self.windows[c] if i <= k):
                entries = [*waits, *order.get(i, ()), *([(self._end[c], -1.0)] if i == k else [])]
                if i < self.last:
                    time = self.lp.row(-math.inf, 0.0)
                    entries.append((time, 1.0))
                    share.append((time, max(self.points[i], self.heads[c]) - self.points[i + 1]))
                for option, whole in self.options[c]:
                    for slot in self.slot_rows(i, option) if i < self.last else [None]:
                        self.lp.column([(work, 1.0 / whole), *entries, *([slot] if slot else [])])
            self.lp.column(share)
