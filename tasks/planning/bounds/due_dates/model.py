"""The pattern LP between due dates: its dual prices are those of `prices`."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from ringmaster.tasks.planning.bounds.dominance import useful_options
from ringmaster.tasks.planning.bounds.due_dates.prices import dues_of
from ringmaster.tasks.planning.bounds.job_costs import whole_of
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.bounds.pattern_model import steps_of
from ringmaster.tasks.planning.bounds.window_model import evenly
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem

MAX_WINDOWS = 16
MAX_SIZE = 1_500  # limit of windows x jobs: about a second


def due_prices(problem: Problem, latest: Mapping[str, float], *, unit_s: float) -> WindowPrices | None:
    """Returns the prices that prove most of the largest of factor x end; None where the LP has no solution.

    latest: the factors, by job.
    unit_s: a lower bound on the last end, the unit of all times.
    """
    dues = dues_of(problem, latest)
    different = sorted(set(dues.values()))
    if not different:
        return None
    most = max(1, min(MAX_WINDOWS, MAX_SIZE // len(problem.jobs)))
    return _DueModel(problem, dues, (0.0, *evenly(different[:-1], most - 1)), unit_s=unit_s).prices()


class _DueModel:
    """Minimises V over x[j,o,i], the seconds of (j, o) in window i from V u[i] to V u[i + 1], where u[i] < due[j]:

    work    sum_{o,i} x[j,o,i] / whole[o]  >= 1
    time    sum_o x[j,o,i]                 <= V (u[i + 1] - u[i])
    slots   as in the pattern LP, for each window
    """

    def __init__(
        self, problem: Problem, dues: Mapping[str, float], points: tuple[float, ...], *, unit_s: float
    ) -> None:
        self.problem, self.points, self.lp = problem, points, LinearProgram()
        self.value = self.lp.column(cost=1.0)  # times the latest due date, in units
        end = max(dues.values())
        self.lengths = [(b - a) / end for a, b in zip(points, (*points[1:], end), strict=True)]
        self._time: dict[tuple[str, int], int] = {}
        self._slots: dict[tuple[int, str, int], int] = {}
        for job in problem.jobs:
            if job.id in dues:
                options = [(job.options[k], whole_of(job, k, problem.switch_cost_s)) for k in useful_options(job)]
                work = self.lp.row(1.0, math.inf)
                for i in (i for i, begin in enumerate(points) if begin < dues[job.id]):
                    time = self._time[job.id, i] = self._row_of_length(i, 1.0)
                    for option, whole_s in options:
                        for kind in problem.device_types:
                            if option.device_type in ("", kind):
                                slot = (self._slot_row(i, kind, option.slot), float(option.num_nodes))
                                self.lp.column([(work, unit_s / whole_s), (time, 1.0), slot])
        for i in range(len(points)):
            self._add_nodes(i)

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

    def _row_of_length(self, i: int, count: float) -> int:
        """Adds a row of what is at most `count` times the length of window i."""
        row = self.lp.row(-math.inf, 0.0)
        self.lp.columns[self.value].append((row, -count * self.lengths[i]))
        return row

    def _slot_row(self, i: int, kind: str, slot: int) -> int:
        key = (i, kind, slot)
        if key not in self._slots:
            self._slots[key] = self.lp.row(-math.inf, 0.0)
        return self._slots[key]

    def _add_nodes(self, i: int) -> None:
        for (kind, size), count in Counter((n.device_type, n.num_devices) for n in self.problem.nodes).items():
            slots = tuple(slot for at, own, slot in self._slots if (at, own) == (i, kind))
            rows = [self._row_of_length(i, float(count)), *(self.lp.row(0.0, 0.0) for _ in range(size - 1))]
            for place, slot in steps_of(size, slots):
                entries = [(self._slots[i, kind, slot], -1.0)] if slot else []
                entries.append((rows[place], 1.0))
                if (reached := place + max(1, slot)) < size:
                    entries.append((rows[reached], -1.0))
                self.lp.column(entries)
