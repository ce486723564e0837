"""The pattern LP by windows of time: its bound knows of jobs that wait or arrive later, and of nodes that go away.

Windows begin at releases, at the earliest starts of jobs that wait, and where nodes go away. See `windows` for what the
prices prove.
"""

import math
from collections.abc import Sequence

from ringmaster.tasks.planning.bounds.order import earliest_starts_s
from ringmaster.tasks.planning.bounds.window_rows import WindowRows
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem

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
