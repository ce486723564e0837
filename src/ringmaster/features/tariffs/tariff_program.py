"""The linear program whose dual prices are the certificate of a bound by prices that change over time."""

import math
from collections import defaultdict
from collections.abc import Sequence

from ringmaster.features.tariffs.tariff_bound import TariffBound, TariffPrices, least_area
from ringmaster.features.tariffs.tariff_values import Factors
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob
from ringmaster.tasks.planning.problems.series import MEASURES

UNDONE = 100.0  # price of a job that is left undone, in values of the whole


class TariffProgram:
    """The linear program of a bound for plans that end in one window, or at any time.

    last: the index of the window in which the last job ends; None where the end is free, and costs nothing.
    is_elastic: whether budgets may be exceeded, each by the same share of it, which is what the program then minimises
        beside the factors.
    """

    def __init__(
        self, bound: TariffBound, *, last: int | None, factors: Factors | None = None, is_elastic: bool = False
    ) -> None:
        self.bound, self.last, self.factors = bound, last, factors or bound.factors
        problem, lp = bound.problem, LinearProgram()
        self.lp = lp
        self.unit_s = max(bound.points_s[-1], max(min(o.whole_s for o in job.options) for job in problem.jobs))
        self.num = len(bound.points_s) if last is None else last + 1
        before_s = math.inf if last is None else bound.ends_s[last]
        self.end: int | None = None
        self.end_s = 0.0
        self.value_unit = self._value_unit()
        if last is not None:
            self.end = lp.column(cost=self.factors.end * self.unit_s / self.value_unit)
            lp.limits[self.end] = (bound.points_s[last] / self.unit_s, min(before_s, bound.latest_end_s) / self.unit_s)
        self.budgets = {name: lp.row(-math.inf, 1.0) for name in MEASURES if problem.budgets.get(name, 0.0) > 0}
        if is_elastic:
            lp.column([(row, -1.0) for row in self.budgets.values()], cost=1.0)
        self.time: dict[tuple[int, int], int] = {}
        self.quota: dict[tuple[str, int], int] = {}
        self.class_of = {problem.jobs[j].id: c for c, members in enumerate(bound.classes) for j in members}
        self.work = [lp.row(self._num_alike(members), math.inf) for members in bound.classes]
        for c, members in enumerate(bound.classes):
            self._add_class(c, problem.jobs[members[0]], before_s)
        self._add_nodes()

    def _value_unit(self) -> float:
        """Returns a value of the size of the optimum, which makes the objective about 1."""
        bound = self.bound
        none = TariffPrices(slots=({},) * len(bound.points_s))
        plain = TariffBound(bound.problem, self.factors, points_s=bound.points_s)
        total = plain.between(none, self.unit_s, math.inf)
        return total if 0 < total < math.inf else 1.0

    def _num_alike(self, members: Sequence[int]) -> float:
        """Returns the work of a class of jobs, in multiples of that of its first one."""
        areas = [least_area(self.bound.problem.jobs[j]) for j in members]
        return math.fsum(area / areas[0] for area in areas)

    def _add_class(self, c: int, job: PlanningJob, before_s: float) -> None:
        bound = self.bound
        if self.end is not None:  # work that such an early end leaves undone, so that there is an optimum
            self.lp.column([(self.work[c], 1.0)], cost=UNDONE)
        job = bound.jobs[job.id]
        for k, option in enumerate(job.options):
            classes = [c, *(self.class_of[name] for name in option.jobs)]
            whole_s = bound.whole_s(job, k)
            for i in bound.windows_of_group(job, option, before_s=before_s):
                rows = [(self.work[each], self.unit_s / whole_s) for each in classes]
                rows += [row for each in classes for row in self._time_row(each, i)]
                for kind in bound.kinds_of(option):
                    self._add_option(job, option, i, kind, list(rows))

    def _add_option(
        self, job: PlanningJob, option: Option, i: int, kind: str, entries: list[tuple[int, float]]
    ) -> None:
        bound, lp = self.bound, self.lp
        money, grams = bound.least_rates(option, kind, i)
        if not self._is_endless(i):
            entries.append((lp.slot_row(i, kind, option.slot), float(option.num_nodes)))
        limit = bound.problem.limits.get(job.user)
        if limit is not None and not self._is_endless(i):
            entries.append((self._quota_row(job.user, i, limit), float(option.num_devices)))
        for name, row in self.budgets.items():
            rate = money if name == "cost" else grams
            if rate:
                entries.append((row, option.num_devices * rate * self.unit_s / bound.problem.budgets[name]))
        cost = option.num_devices * self.factors.rate(money, grams) * self.unit_s / self.value_unit
        lp.column(entries, cost=cost)

    def _is_endless(self, i: int) -> bool:
        return self.last is None and i == len(self.bound.points_s) - 1

    def _length_row(self, i: int, *, start_s: float, end_s: float, count: float) -> int:
        """Returns a row `<= count x length` of a part of a window; the last window ends at T."""
        if self.end is None or i != self.last:
            return self.lp.row(-math.inf, count * (end_s - start_s) / self.unit_s)
        row = self.lp.row(-math.inf, -count * start_s / self.unit_s)
        self.lp.columns[self.end].append((row, -count))
        return row

    def _time_row(self, c: int, i: int) -> list[tuple[int, float]]:
        """Returns the entry of the row by which each job of a class runs once at a time in a window."""
        if (c, i) not in self.time:
            members = self.bound.classes[c]
            start_s, end_s = self.bound.span_s(self.bound.problem.jobs[members[0]], i)
            if self.end is None and math.isinf(end_s):
                return []
            self.time[c, i] = self._length_row(i, start_s=start_s, end_s=end_s, count=float(len(members)))
        return [(self.time[c, i], 1.0)]

    def _quota_row(self, group: str, i: int, limit: int) -> int:
        if (group, i) not in self.quota:
            between = {"start_s": self.bound.points_s[i], "end_s": self.bound.ends_s[i]}
            self.quota[group, i] = self._length_row(i, **between, count=float(limit))
        return self.quota[group, i]

    def _add_nodes(self) -> None:
        """Adds the walks over the nodes of each kind, size and end in each window."""
        for kind, nodes in self.bound.kinds.items():
            groups: dict[tuple[int, float], int] = defaultdict(int)
            for node in nodes:
                until_s = math.inf if node.available_until_s is None else node.available_until_s
                groups[node.num_devices, until_s] += 1
            for i in range(self.num):
                if self._is_endless(i) or not any(key[:2] == (i, kind) for key in self.lp.slots):
                    continue
                for (size, until_s), count in groups.items():
                    start_s, end_s = self.bound.points_s[i], min(self.bound.ends_s[i], until_s)
                    if end_s <= start_s:
                        continue
                    first = self._length_row(i, start_s=start_s, end_s=end_s, count=float(count))
                    self.lp.add_walks([first, *(self.lp.row(0.0, 0.0) for _ in range(size - 1))], i, kind)

    def solve(self) -> TariffPrices | None:
        """Returns the dual prices; None where the program has no solution. Sets `end_s`, where the end is not free."""
        values, duals = self.lp.optimum()
        if not values:
            return None
        if self.end is not None:
            self.end_s = values[self.end] * self.unit_s
        return self._prices(duals)

    def _prices(self, duals: Sequence[float]) -> TariffPrices:
        num, per_second = len(self.bound.points_s), self.value_unit / self.unit_s
        slots: list[dict[str, dict[int, float]]] = [defaultdict(dict) for _ in range(num)]
        for (i, kind, slot), row in self.lp.slots.items():
            if duals[row] < -1e-12:
                slots[i][kind][slot] = -duals[row] * per_second
        jobs: dict[str, list[float]] = {}
        for (c, i), row in self.time.items():
            for j in self.bound.classes[c] if duals[row] < -1e-12 else ():
                jobs.setdefault(self.bound.problem.jobs[j].id, [0.0] * num)[i] = -duals[row] * per_second
        quotas: dict[str, list[float]] = {}
        for (group, i), row in self.quota.items():
            if duals[row] < -1e-12:
                quotas.setdefault(group, [0.0] * num)[i] = -duals[row] * per_second
        budgets = {
            name: -duals[row] * self.value_unit / self.bound.problem.budgets[name]
            for name, row in self.budgets.items()
            if duals[row] < 0
        }
        return TariffPrices(
            slots=tuple(map(dict, slots)),
            jobs={job: tuple(row) for job, row in jobs.items()},
            quotas={group: tuple(row) for group, row in quotas.items()},
            budgets=budgets,
            covers=self._covers(duals) if self.bound.problem.is_fused else {},
        )

    def _covers(self, duals: Sequence[float]) -> dict[str, float]:
        return {job: max(0.0, duals[self.work[c]]) * self.value_unit for job, c in self.class_of.items()}
