"""Lower bounds on the largest of factor x end over jobs: by due dates, and from bounds on the last end of some jobs.

All jobs whose factor is at least f end by value / f. So no value is below f x the bound on the last end of these jobs
alone. Any certificate of a bound on the last end proves a bound of each such set of jobs. These bounds know of
releases, order and leaving nodes; those by due date (`due_date_bound`) know that some jobs end before others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ringmaster.tasks.planning.bounds.bounds import Bound, ValueBound, by_area, preemptive_bound
from ringmaster.tasks.planning.bounds.certificates import certified_bound
from ringmaster.tasks.planning.bounds.due_date_bound import due_bound, dues_of, factors_of
from ringmaster.tasks.planning.bounds.job_costs import earliest_ends_s, earliest_starts_s, useful_options, whole_of
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.bounds.pattern_model import steps_of
from ringmaster.tasks.planning.bounds.window_model import evenly, has_windows
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import PlanningJob, Problem
from ringmaster.tasks.planning.problems.reductions import only

MAX_LPS = 12
FIRST_STEP, LEAST_STEP = 0.04, 2e-3  # shares by which a supposed value is above the bound
MAX_WINDOWS = 16
MAX_SIZE = 1_500  # limit of windows x jobs: about a second


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
        if least * (1 + LEAST_STEP / 2) < proved < math.inf:
            best, least = prices, proved
        else:
            step /= 2
        if step < LEAST_STEP:
            break
    return best


def _points_of(problem: Problem, dues: Mapping[str, float], value: float) -> tuple[float, ...]:
    """Returns where windows begin: at due dates, and where jobs can start and nodes leave at that value."""
    seconds = {*earliest_starts_s(problem).values(), *(node.available_until_s or 0.0 for node in problem.nodes)}
    points = sorted({*dues.values(), *(s / value for s in seconds)} - {0.0})
    most = max(1, min(MAX_WINDOWS, MAX_SIZE // len(problem.jobs)))
    return (0.0, *evenly([point for point in points if point < max(dues.values())], most - 1))


class _DueModel:
    """Maximises the share z of all jobs that is done at a value v, over the seconds x[j,o,i] of (j, o) in window i.

    work    sum_{o,i} x[j,o,i] / whole[o]  >= z
    time    sum_o x[j,o,i]                 <= length of window i after head[j]        where u[i] < due[j]
    slots   as in the pattern LP, for each window and the nodes that are there
    """

    def __init__(self, problem: Problem, dues: Mapping[str, float], points: tuple[float, ...], *, value: float) -> None:
        self.problem, self.points, self.lp = problem, points, LinearProgram()
        self.unit_s = value * max(dues.values())
        self.begins = [value * point / self.unit_s for point in points]
        self.ends = [*self.begins[1:], 1.0]
        self._time: dict[tuple[str, int], int] = {}
        self._slots: dict[tuple[int, str, int], int] = {}
        self.done = self.lp.column(cost=-1.0)
        heads_s = earliest_starts_s(problem)
        for job in problem.jobs:
            if job.id in dues:
                last = sum(point < dues[job.id] for point in points)
                self._add_job(job, range(last), head=heads_s[job.id] / self.unit_s)
        for i in range(len(points)):
            self._add_nodes(i)

    def _add_job(self, job: PlanningJob, windows: Iterable[int], *, head: float) -> None:
        options = [(job.options[k], whole_of(job, k, self.problem.switch_cost_s)) for k in useful_options(job)]
        work = self.lp.row(0.0, math.inf)
        self.lp.columns[self.done].append((work, -1.0))
        for i in windows:
            if self.ends[i] <= head:
                continue
            time = self._time[job.id, i] = self.lp.row(-math.inf, self.ends[i] - max(self.begins[i], head))
            for option, whole_s in options:
                for kind in self.problem.device_types:
                    if option.device_type in ("", kind):
                        slot = (self._slot_row(i, kind, option.slot), float(option.num_nodes))
                        self.lp.column([(work, self.unit_s / whole_s), (time, 1.0), slot])

    def prices(self) -> WindowPrices | None:
        duals = self.lp.prices()
        if duals is None:
            return None
        slots: list[dict[str, dict[int, float]]] = [defaultdict(dict) for _ in self.points]
        for (i, kind, slot), row in self._slots.items():
            slots[i][kind][slot] = max(0.0, -duals[row])
        own: dict[str, list[float]] = {}
        for (job, i), row in self._time.items():
            if duals[row] < -1e-12:
                own.setdefault(job, [0.0] * len(self.points))[i] = -duals[row]
        return WindowPrices(self.points, tuple(map(dict, slots)), {job: tuple(row) for job, row in own.items()})

    def _slot_row(self, i: int, kind: str, slot: int) -> int:
        key = (i, kind, slot)
        if key not in self._slots:
            self._slots[key] = self.lp.row(-math.inf, 0.0)
        return self._slots[key]

    def _add_nodes(self, i: int) -> None:
        groups = Counter((n.device_type, n.num_devices, n.available_until_s) for n in self.problem.nodes)
        for (kind, size, until_s), count in groups.items():
            until = math.inf if until_s is None else until_s / self.unit_s
            there = count * max(0.0, min(self.ends[i], until) - self.begins[i])
            slots = tuple(slot for at, own, slot in self._slots if (at, own) == (i, kind))
            rows = [self.lp.row(-math.inf, there), *(self.lp.row(0.0, 0.0) for _ in range(size - 1))]
            for place, slot in steps_of(size, slots):
                entries = [(self._slots[i, kind, slot], -1.0)] if slot else []
                entries.append((rows[place], 1.0))
                if (reached := place + max(1, slot)) < size:
                    entries.append((rows[reached], -1.0))
                self.lp.column(entries)


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
    factors, ends_s = factors_of(problem, latest), earliest_ends_s(problem)
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
        if has_windows(problem) or problem.is_fused:
            tried += [preemptive_bound(part).certificate for _, part in parts_of(problem, latest)]
        least = latest_bound(problem, latest, bound_s=bound.seconds, certificate=bound.certificate)
        if 0 < least < math.inf and not problem.is_fused:
            by_due = due_prices(problem, latest, least=least)
            tried.append(Certificate(due=by_due) if by_due else None)
    found = [ValueBound(latest_bound(problem, latest, bound_s=bound.seconds, certificate=each), each) for each in tried]
    return max(found, key=lambda each: each.value)


def parts_of(problem: Problem, latest: Mapping[str, float]) -> Iterator[tuple[float, Problem]]:
    """Yields factors, each with the jobs whose factor is at least that, if there are several different ones."""
    factors = factors_of(problem, latest)
    different = sorted({factor for factor in factors.values() if factor > 0}, reverse=True)
    if len(set(factors.values())) > 1:
        for factor in evenly(different, MAX_SETS):
            yield factor, only(problem, {job for job, own in factors.items() if own >= factor})
