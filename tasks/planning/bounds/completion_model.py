"""The LP by windows of time for the sum of weight x end; see `completion_bound` for what its dual prices prove."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ringmaster.tasks.planning.bounds.completion_bound import can_end_in, faults_of, kappa_of
from ringmaster.tasks.planning.bounds.job_costs import earliest_starts_s, in_order, least_of, shortest_s
from ringmaster.tasks.planning.bounds.window_model import Classes, WindowRows
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.plans.window_prices import CompletionPrices
from ringmaster.tasks.planning.problems.problem import Problem

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
    area_s = {job.id: least_of(job, [float(o.num_devices) for o in job.options], 0.0) for job in problem.jobs}
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
    found: dict[tuple[int, float], list[int]] = {}
    for c, members in enumerate(problem.classes):
        for j in members:
            if (name := problem.jobs[j].id) in needed:
                found.setdefault((c, weights.get(name, 0.0)), []).append(j)
    return tuple(map(tuple, found.values()))


class CompletionModel(WindowRows):
    """The LP that minimises the sum of weight[c] C[c] over C[c], the sum of the ends of the jobs of class c.

    Columns: share[c,k] of class c that ends in window k; x[c,o,i,k] seconds in window i of what ends in k. Beside the
    rows of `WindowRows`, whose x[c,o,i] are the sum over k:

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
                into = [-price for (_, b), price in waits.items() if b == name]
                out = [price for (a, _), price in waits.items() if a == name]
                net = math.fsum((self.weights.get(name, 0.0), *out, *into))
                end_prices[name] = min(max(0.0, duals[self._end[c]]), max(0.0, net))
                work[name] = tuple(
                    self.unit_s * max(0.0, duals[self._work[c, k]]) if (c, k) in self._work else 0.0
                    for k in range(self.num)
                )
        return CompletionPrices(self.window_prices(duals, {}), end_prices, waits, work)

    def _wait_prices(self, duals: Sequence[float], names: Sequence[Sequence[str]]) -> dict[tuple[str, str], float]:
        """Returns the prices of the rows `wait`, scaled down where a job would pay more than it has."""
        waits: dict[tuple[str, str], float] = {}
        for (a, c), row in self._after.items():
            for name in names[c] if duals[row] > 1e-12 else ():
                waits[self.jobs[a].id, name] = duals[row] / len(names[c])
        has = {name: self.weights.get(name, 0.0) for members in names for name in members}
        for job in reversed(list(in_order(self.problem))):
            into = {pair: price for pair, price in waits.items() if pair[1] == job.id}
            out = math.fsum(price for pair, price in waits.items() if pair[0] == job.id)
            paid, most = math.fsum(into.values()), (has.get(job.id, 0.0) + out) * (1 - 1e-12)
            if paid > most:
                waits |= {pair: price * most / paid for pair, price in into.items()}
        return waits

    def _add_completion(self, c: int) -> None:
        """Adds C[c], share[c,k] and their rows."""
        job, count = self.jobs[c], float(len(self.classes[c]))
        end_s = earliest_starts_s(self.problem)[job.id] + shortest_s(job, self.problem.switch_cost_s)
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
            row = self._after[a, c] = self.lp.row(0.0, math.inf)
            self.lp.columns[self._completion[c]].append((row, 1.0 / count))
            self.lp.columns[self._completion[a]].append((row, -1.0))
            waits.append((row, -1.0 / count))
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
