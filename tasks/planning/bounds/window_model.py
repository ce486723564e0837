"""The pattern LP by windows of time: its bound knows of jobs that wait or arrive later, and of nodes that go away.

Windows begin at releases, at the earliest starts of jobs that wait, and where nodes go away. See `window_bound` for
what the prices prove.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ringmaster.tasks.planning.bounds.job_costs import earliest_starts_s, useful_options, whole_of
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.bounds.pattern_model import steps_of
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import Option, Problem

Classes = Sequence[tuple[int, ...]]  # indices of jobs that are alike


class WindowRows:
    """A linear program over windows i from points a_i, with times in units of `unit_s`.

    The last window ends at the column T that the program minimises, or never if `with_end` is False; it then has none
    of the rows below. x[c,o,i] stands for all seconds of the m[c] jobs of class c under option o in window i. Columns:
    d[c,i] for jobs that wait or are waited for, the time in window i by which they and all that they wait for are done
    for it; f[g,v,s,i] the time that nodes of group g step from position v by s devices. Rows:

        begin  d[c,i] - sum_o x[c,o,i] / m[c] >= length of i before head[c]
        wait   d[c,i] - d[a,i] - sum_o x[c,o,i] / m[c]  >= 0                        for each a that c waits for
        stop   d[c,i]                         <= length of i
        slots  sum_{c,o of slot s} nodes[o] x[c,o,i] - sum_{g,v} f[g,v,s,i]  <= 0   for each type and slot size s
        walk   as in the pattern LP, where the nodes of group g are there for their part of window i
    """

    def __init__(
        self, problem: Problem, *, classes: Classes, points_s: tuple[float, ...], unit_s: float, with_end: bool
    ) -> None:
        self.problem, self.classes, self.points_s, self.unit_s = problem, classes, points_s, unit_s
        self.points = [point / unit_s for point in points_s]
        self.num, self.last = len(points_s), len(points_s) - 1
        self.lp = LinearProgram()
        self.end = self.lp.column(cost=1.0) if with_end else None
        heads_s = earliest_starts_s(problem)
        self.jobs = [problem.jobs[members[0]] for members in classes]
        self.heads = [heads_s[job.id] / unit_s for job in self.jobs]
        special = {other for job in problem.jobs for other in job.after}
        self.is_ordered = [bool(job.after) or job.id in special for job in self.jobs]
        self.class_of = {problem.jobs[j].id: c for c, members in enumerate(classes) for j in members}
        ends_s = (*points_s[1:], math.inf)
        self.windows = [[i for i, end_s in enumerate(ends_s) if end_s > heads_s[job.id]] for job in self.jobs]
        self.options = [
            [(job.options[k], whole_of(job, k, problem.switch_cost_s) / unit_s) for k in useful_options(job)]
            for job in self.jobs
        ]
        self._slots: dict[tuple[int, str, int], int] = {}
        self._begin: dict[tuple[int, int], int] = {}
        self._wait: dict[tuple[int, int, int], int] = {}

    def slot_rows(self, i: int, option: Option) -> list[tuple[int, float]]:
        """Returns the row and coefficient of an option in window i for each type of devices that it may use."""
        kinds = [kind for kind in self.problem.device_types if option.device_type in ("", kind)]
        keys = [(i, kind, option.slot) for kind in kinds]
        for key in keys:
            if key not in self._slots:
                self._slots[key] = self.lp.row(-math.inf, 0.0)
        return [(self._slots[key], float(option.num_nodes)) for key in keys]

    def order_rows(self, c: int, i: int) -> list[tuple[int, float]]:
        """Adds the rows `begin` and `wait` of a class in window i, and returns its coefficients there."""
        share = -1.0 / len(self.classes[c])
        self._begin[c, i] = self.lp.row(max(0.0, self.heads[c] - self.points[i]), math.inf)
        found = [(self._begin[c, i], share)]
        for other in self.jobs[c].after:
            a = self.class_of.get(other)
            if a is not None and i in self.windows[a]:
                self._wait[a, c, i] = self.lp.row(0.0, math.inf)
                found.append((self._wait[a, c, i], share))
        return found

    def add_order(self) -> None:
        """Adds the columns d[c,i] and the rows that stop them at the end of the window."""
        entries = {key: [(row, 1.0)] for key, row in self._begin.items()}
        for (a, c, i), row in self._wait.items():
            entries[c, i].append((row, 1.0))
            entries[a, i].append((row, -1.0))
        for (_, i), column in entries.items():
            if i < self.last:
                self.lp.column(column, upper=self.points[i + 1] - self.points[i])
            else:
                assert self.end is not None
                stop = self.lp.row(-math.inf, -self.points[i])
                self.lp.columns[self.end].append((stop, -1.0))
                self.lp.column([*column, (stop, 1.0)])

    def add_nodes(self) -> None:
        """Adds the walks over nodes in each window."""
        groups = Counter((n.device_type, n.num_devices, n.available_until_s) for n in self.problem.nodes)
        for (kind, size, until_s), count in groups.items():
            until = math.inf if until_s is None else until_s / self.unit_s
            for i in range(self.num if self.end is not None else self.last):
                slots = tuple(slot for at, own, slot in self._slots if (at, own) == (i, kind))
                if until <= self.points[i] or not slots:
                    continue
                rows = self._walk_rows(i, count, until, size)
                for place, slot in steps_of(size, slots):
                    entries = [(self._slots[i, kind, slot], -1.0)] if slot else []
                    entries.append((rows[place], 1.0))
                    if (reached := place + max(1, slot)) < size:
                        entries.append((rows[reached], -1.0))
                    self.lp.column(entries)

    def _walk_rows(self, i: int, count: int, until: float, size: int) -> list[int]:
        """Adds the rows of the positions of a group of nodes; what leaves position 0 is the time that it is there."""
        if i < self.last or self.end is None:
            there = count * (min(until, self.points[i + 1]) - self.points[i])
            return [self.lp.row(there, there), *(self.lp.row(0.0, 0.0) for _ in range(size - 1))]
        first = self.lp.row(-math.inf, -count * self.points[i])
        self.lp.columns[self.end].append((first, -float(count)))
        if until < math.inf:
            rest = [self.lp.row(0.0, 0.0) for _ in range(size)]
            self.lp.column([(first, 1.0), (rest[0], -1.0)], upper=count * (until - self.points[i]))
            return rest
        return [first, *(self.lp.row(0.0, 0.0) for _ in range(size - 1))]

    def window_prices(self, duals: Sequence[float], own: dict[str, list[float]]) -> WindowPrices:
        """Returns the dual prices of slots and of the order; `own` are those of jobs that are alone in the order."""
        slots: list[dict[str, dict[int, float]]] = [defaultdict(dict) for _ in range(self.num)]
        for (i, kind, slot), row in self._slots.items():
            if duals[row] < 0:
                slots[i][kind][slot] = -duals[row]
        order = self._order_prices(duals)
        into, out = _sums(order, 1, self.num), _sums(order, 0, self.num)
        none = [0.0] * self.num
        for (c, i), row in self._begin.items():
            for j in self.classes[c]:
                job = self.problem.jobs[j].id
                source = max(0.0, duals[row]) / len(self.classes[c])
                price = max(into.get(job, none)[i] + source, out.get(job, none)[i])
                if price > 0:
                    own.setdefault(job, [0.0] * self.num)[i] = price
        rows = {job: tuple(row) for job, row in own.items()}
        return WindowPrices(self.points_s, tuple(map(dict, slots)), rows, order)

    def _order_prices(self, duals: Sequence[float]) -> dict[tuple[str, str], tuple[float, ...]]:
        """Returns the dual prices of the rows `wait`, by pair of jobs and window."""
        found: dict[tuple[str, str], list[float]] = {}
        for (a, c, i), row in self._wait.items():
            members = self.classes[c]
            if duals[row] > 1e-12:
                for j in members:
                    pair = (self.jobs[a].id, self.problem.jobs[j].id)
                    found.setdefault(pair, [0.0] * self.num)[i] = duals[row] / len(members)
        return {pair: tuple(row) for pair, row in found.items()}


def _sums(order: Mapping[tuple[str, str], tuple[float, ...]], side: int, num: int) -> dict[str, list[float]]:
    """Returns the sum of the prices of pairs by their first (side 0) or second job (side 1) and window."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    for pair, row in order.items():
        rows.setdefault(pair[side], []).append(row)
    return {job: [math.fsum(row[i] for row in found) for i in range(num)] for job, found in rows.items()}


MAX_WINDOWS = 16
MAX_SIZE = 600  # limit of windows x classes of jobs: a few tenths of a second


def has_windows(problem: Problem) -> bool:
    """Whether the time at which something runs matters for the bound: windows can raise it then."""
    return not problem.is_fused and (
        any(job.after or job.release_s for job in problem.jobs)
        or any(node.available_until_s is not None for node in problem.nodes)
    )


def points_of(problem: Problem, *, before_s: float) -> tuple[float, ...]:
    """Returns where windows begin, in seconds: not more than the LP can handle, evenly chosen from all that matter."""
    points = {*earliest_starts_s(problem).values()}
    points |= {node.available_until_s for node in problem.nodes if node.available_until_s is not None}
    ascending = sorted(point for point in points if 0 < point < before_s * (1 - 1e-6))
    most = max(2, min(MAX_WINDOWS, MAX_SIZE // len(problem.classes))) - 1
    return (0.0, *evenly(ascending, most))


def evenly(values: Sequence[float], most: int) -> list[float]:
    """Returns at most that many of the values, evenly chosen."""
    if len(values) <= most:
        return list(values)
    return [values[(2 * k + 1) * len(values) // (2 * most)] for k in range(most)]


class WindowModel(WindowRows):
    """The LP that minimises T over the columns x[c,o,i], for windows that are not over at head[c].

    Beside the rows of `WindowRows`:

        work   sum_{o,i} x[c,o,i] / whole[o]  >= m[c]
        time   sum_o x[c,o,i]                 <= m[c] (length of i after head[c])   where c is alone in the order
    """

    def __init__(self, problem: Problem, *, points_s: tuple[float, ...], unit_s: float) -> None:
        super().__init__(problem, classes=problem.classes, points_s=points_s, unit_s=unit_s, with_end=True)
        self._time: dict[tuple[int, int], int] = {}
        for c, members in enumerate(self.classes):
            work = self.lp.row(float(len(members)), math.inf)
            for i in self.windows[c]:
                entries = self.order_rows(c, i) if self.is_ordered[c] else [(self._time_row(c, i), 1.0)]
                for option, whole in self.options[c]:
                    for slot in self.slot_rows(i, option):
                        self.lp.column([(work, 1.0 / whole), slot, *entries])
        self.add_order()
        self.add_nodes()

    def prices(self) -> WindowPrices | None:
        """Solves the LP and returns its dual prices; None without a solution."""
        duals = self.lp.prices()
        if duals is None:
            return None
        own: dict[str, list[float]] = {}
        for (c, i), row in self._time.items():
            for j in self.classes[c] if duals[row] < -1e-12 else ():
                own.setdefault(self.problem.jobs[j].id, [0.0] * self.num)[i] = -duals[row]
        return self.window_prices(duals, own)

    def _time_row(self, c: int, i: int) -> int:
        count, begins = len(self.classes[c]), max(self.points[i], self.heads[c])
        if i < self.last:
            self._time[c, i] = self.lp.row(-math.inf, count * (self.points[i + 1] - begins))
        else:
            assert self.end is not None
            self._time[c, i] = self.lp.row(-math.inf, -count * begins)
            self.lp.columns[self.end].append((self._time[c, i], -float(count)))
        return self._time[c, i]
