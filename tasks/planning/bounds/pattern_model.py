"""The pattern LP of a problem in HiGHS, its dual prices, and a MILP over the same rows.

A *pattern* is a way to divide one node into slots, such as 5 + 3 of 8 devices. Patterns are not enumerated, but
modelled as walks: a node of G devices is a line of positions 0..G, a slot of s devices is a step from v to v + s, and a
pattern is a walk from 0 to G. So a node of any size costs G columns per slot size instead of one column per pattern.

Jobs that differ only in their id share rows and columns (`Problem.classes`), so a sweep costs as much as one of its
jobs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringmaster.tasks.planning.bounds.job_costs import useful_groups, useful_options, whole_of
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option

Entries = Sequence[tuple[int, float]]  # (row, coefficient) of a column


@dataclass
class LinearProgram:
    """Minimises cost x, subject to lower <= A x <= upper and x >= 0; columns are lists of (row, coefficient).

    slots: rows of the slots of one size, by (..., size); what comes before the size is where they are.
    """

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    columns: list[list[tuple[int, float]]] = field(default_factory=list)
    limits: list[tuple[float, float]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    slots: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def row(self, lower: float, upper: float) -> int:
        """Adds a row and returns its index."""
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.lower) - 1

    def column(
        self, entries: Entries = (), *, cost: float = 0.0, upper: float = math.inf, is_integer: bool = False
    ) -> int:
        """Adds a column >= 0 and returns its index."""
        self.columns.append(list(entries))
        self.limits.append((0.0, upper))
        self.costs.append(cost)
        if is_integer:
            self.integer.append(len(self.columns) - 1)
        return len(self.columns) - 1

    def slot_row(self, *key: Any) -> int:
        """Returns the row of the slots with a key of `slots`, and adds it where it is missing."""
        if key not in self.slots:
            self.slots[key] = self.row(-math.inf, 0.0)
        return self.slots[key]

    def add_walks(self, places: Sequence[int], *where: Any) -> None:
        """Adds the columns by which nodes divide their time into the slots that are there.

        A node of G devices is a line of positions 0..G. A slot of s devices is a step from v to v + s, and a device
        left idle is a step from v to v + 1. On a walk from 0 to G, larger slots come first.

        places: the rows of the positions 0..G-1.
        where: the key of the slots, without their size.
        """
        size = len(places)
        rows = {key[-1]: row for key, row in self.slots.items() if key[:-1] == where}
        reachable = [True] + [False] * size
        steps = []
        for slot in sorted(rows, reverse=True):
            for place in range(size - slot + 1):
                if reachable[place]:
                    reachable[place + slot] = True
                    steps.append((place, slot))
        for place, slot in [*steps, *((place, 0) for place in range(size))]:
            entries = [(rows[slot], -1.0)] if slot else []
            entries.append((places[place], 1.0))
            if (reached := place + max(1, slot)) < size:
                entries.append((places[reached], -1.0))
            self.column(entries)

    def loaded(self) -> Any:
        """Returns HiGHS with this program, for one thread and a fixed seed."""
        import highspy
        import numpy as np

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.columns), len(self.lower)
        lp.col_cost_ = np.array(self.costs)
        lp.col_lower_, lp.col_upper_ = (np.array(side) for side in zip(*self.limits, strict=True))
        lp.row_lower_, lp.row_upper_ = np.array(self.lower), np.array(self.upper)
        if self.integer:
            kinds = [highspy.HighsVarType.kContinuous] * len(self.columns)
            for i in self.integer:
                kinds[i] = highspy.HighsVarType.kInteger
            lp.integrality_ = kinds
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(column) for column in self.columns)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([row for column in self.columns for row, _ in column], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([value for column in self.columns for _, value in column])
        highs: Any = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            highs.setOptionValue(name, value)
        highs.passModel(lp)
        return highs

    def values(self, *, tolerance: float = 1e-7) -> list[float]:
        """Solves the program and returns an optimum by column; [] without one.

        tolerance: by which constraints may be violated.
        """
        import highspy

        highs = self.loaded()
        highs.setOptionValue("primal_feasibility_tolerance", tolerance)
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return []
        return [float(value) for value in highs.getSolution().col_value]

    def prices(self) -> list[float] | None:
        """Solves the program and returns the dual prices of its rows; None without finite ones.

        A row `>=` has a price >= 0, and a row `<=` one <= 0, up to the solver's tolerance.
        """
        highs = self.loaded()
        highs.run()
        prices = [float(price) for price in highs.getSolution().row_dual]
        return prices if prices and all(map(math.isfinite, prices)) else None


MAX_NODES = 3_000  # of a MILP's branch-and-bound tree
NODE_S = 2.5e-5  # work of a node, per column


@dataclass(frozen=True)
class _Column:
    """Time of the class whose first job is `job` under one of that job's options, on nodes of one device type."""

    job: int
    option: int
    kind: str
    seconds: float  # of a whole job, in units of `unit_s`
    rows: tuple[int, ...]  # indices of the classes whose work it does


class PatternModel:
    """The pattern LP or MILP, with times in units of `unit_s`, so that the solver's tolerances fit all problems.

    Columns: T; y[c,o] the time of all jobs of class c under option o; x[g] the time that all nodes of group g are in
    use, where a group is the nodes of one type, size and end of availability; f[g,v,s] the time that nodes of group g
    step from position v by s devices (a slot, or 1 for a device left idle). With m[c] jobs in class c, the rows are

        work   sum_o y[c,o] / seconds[o]  >= m[c]                                 for each class c, over the
               options o that do its work: its own, and fused groups that include it
        time   sum_o y[c,o] - m[c] T      <= - m[c] release[c]                    for each class c, over the same
        quota  sum_{c,o of group} devices[o] y[c,o] - quota T <= 0                for each group with a quota
        slots  sum_{c,o of slot s} nodes[o] y[c,o] - sum_{g,v} f[g,v,s]  <= 0     for each type and slot size s
        walk   sum_s f[g,v,s] - sum_s f[g,v-s,s] - (x[g] if v = 0 else 0) = 0     for each group g and position v
        nodes  x[g] - nodes[g] T          <= 0, x[g] <= nodes[g] end[g]           for each group g

    seconds[o] are those of the whole job in one segment under option o. In the LP of a problem with fused groups, they
    are those of the work alone. `certified_bound` recomputes what the prices prove where jobs have several segments.

    The MILP (`is_integer`) is a relaxation of every plan without preemption: y[c,o] is seconds[o] times an integer
    number of jobs. An option that takes longer than `unit_s` and has any job makes T at least as long.
    """

    def __init__(self, problem: Problem, *, unit_s: float, is_integer: bool = False) -> None:
        self.problem, self.unit_s, self.is_integer = problem, unit_s, is_integer
        self.classes = problem.classes
        self.lp = LinearProgram()
        self.lp.column(cost=1.0)  # T
        self._work, self._time = self._class_rows()
        self._quota = {group: self.lp.row(-math.inf, 0.0) for group in problem.limits}
        self.lp.columns[0] += [(row, -float(problem.limits[group])) for group, row in self._quota.items()]
        self.options = self._find_options()
        for kind, slot in sorted({(c.kind, self._option(c).slot) for c in self.options}):
            self.lp.slot_row(kind, slot)
        self._first_option = len(self.lp.columns)
        for column in self.options:
            self._add_option(column)
        self._add_walks()
        if is_integer:
            self._add_long_options()
        self.highs: Any = self.lp.loaded()

    def _class_rows(self) -> tuple[list[int], list[int]]:
        work, time = [], []
        for jobs in self.classes:
            count, job = len(jobs), self.problem.jobs[jobs[0]]
            work.append(self.lp.row(float(count), math.inf))
            time.append(self.lp.row(-math.inf, -count * job.release_s / self.unit_s))
            self.lp.columns[0].append((time[-1], -float(count)))
        return work, time

    def _find_options(self) -> list[_Column]:
        class_of = {self.problem.jobs[j].id: c for c, jobs in enumerate(self.classes) for j in jobs}
        places = [(jobs[0], k) for jobs in self.classes for k in useful_options(self.problem.jobs[jobs[0]])]
        places += useful_groups(self.problem)
        columns = []
        for j, k in places:
            job = self.problem.jobs[j]
            option = job.options[k]
            is_lp_of_groups = self.problem.is_fused and not self.is_integer
            seconds = option.runtime_s if is_lp_of_groups else whole_of(job, k, self.problem.switch_cost_s)
            rows = tuple(class_of[name] for name in (job.id, *option.jobs))
            columns += [_Column(j, k, kind, seconds / self.unit_s, rows) for kind in self.problem.types_of(option)]
        return columns

    def _option(self, column: _Column) -> Option:
        return self.problem.jobs[column.job].options[column.option]

    def _add_option(self, column: _Column) -> None:
        scale = column.seconds if self.is_integer else 1.0
        entries = [(self._work[c], scale / column.seconds) for c in column.rows]
        entries += [(self._time[c], scale) for c in column.rows]
        option = self._option(column)
        entries.append((self.lp.slot_row(column.kind, option.slot), scale * option.num_nodes))
        if (row := self._quota.get(self.problem.jobs[column.job].group)) is not None:
            entries.append((row, scale * option.num_devices))
        most = float(len(self.classes[column.rows[0]])) if self.is_integer else math.inf
        self.lp.column(entries, upper=most, is_integer=self.is_integer)

    def _add_walks(self) -> None:
        for (kind, size, until_s), count in self.problem.node_groups.items():
            places = [self.lp.row(0.0, 0.0) for _ in range(size)]
            if until_s is None:
                self.lp.columns[0].append((places[0], -float(count)))
            else:
                in_use = self.lp.row(-math.inf, 0.0)
                self.lp.columns[0].append((in_use, -float(count)))
                self.lp.column([(in_use, 1.0), (places[0], -1.0)], upper=count * until_s / self.unit_s)
            self.lp.add_walks(places, kind)

    def _add_long_options(self) -> None:
        """M z >= n for the n of m jobs of a class under an option, and T >= seconds z, with z 0 or 1."""
        for i, column in enumerate(self.options):
            count = len(self.classes[column.rows[0]])
            if count > 1 and column.seconds > 1.0:
                any_row, long_row = self.lp.row(-math.inf, 0.0), self.lp.row(-math.inf, 0.0)
                self.lp.columns[self._first_option + i].append((any_row, 1.0))
                self.lp.columns[0].append((long_row, -1.0))
                self.lp.column([(any_row, -float(count)), (long_row, column.seconds)], upper=1.0, is_integer=True)

    def solve(self, *, work_s: float = 5.0, time_limit_s: float = 300.0) -> bool:
        """Runs the solver and returns whether it ended with an optimum.

        work_s: limit of a MILP's work on a quiet machine, as a number of nodes, which is the same at any load.
        time_limit_s: limit by the wall clock.
        """
        import highspy

        self.highs.setOptionValue("time_limit", max(0.01, time_limit_s))
        if self.is_integer:
            max_nodes = work_s / (NODE_S * len(self.lp.columns))
            self.highs.setOptionValue("mip_rel_gap", 1e-5)
            self.highs.setOptionValue("mip_max_nodes", int(max(1, min(MAX_NODES, max_nodes))))
        self.highs.run()
        return bool(self.highs.getModelStatus() == highspy.HighsModelStatus.kOptimal)

    def certificate(self) -> Certificate | None:
        """Returns the LP's dual prices; small negative ones, from rounding, become 0. None without a solution."""
        duals = self.highs.getSolution().row_dual
        if len(duals) == 0 or not all(math.isfinite(value) for value in duals):
            return None
        typed: dict[str, dict[int, float]] = {kind: {} for kind in self.problem.device_types}
        for (kind, slot), row in self.lp.slots.items():
            typed[kind][slot] = max(0.0, -float(duals[row]))
        own = {
            self.problem.jobs[j].id: -float(duals[row])
            for jobs, row in zip(self.classes, self._time, strict=True)
            for j in jobs
            if duals[row] < -1e-12
        }
        cover = {}
        if self.problem.is_fused:
            rows = zip(self.classes, self._work, strict=True)
            cover = {self.problem.jobs[j].id: max(0.0, float(duals[row])) for jobs, row in rows for j in jobs}
        quotas = {group: price for group, row in self._quota.items() if (price := -float(duals[row])) > 0}
        slots = next(iter(typed.values())) if len(typed) == 1 else {}
        more = {} if len(typed) == 1 else typed
        return Certificate(slots, own, cover_prices=cover, typed_prices=more, quota_prices=quotas)

    def bound_s(self) -> float:
        """Returns the MILP's dual bound in seconds, less the solver's tolerance; 0 where it proved nothing."""
        value = self.highs.getInfo().mip_dual_bound * (1 - 2e-6) * self.unit_s
        return value if math.isfinite(value) else 0.0

    def chosen_options(self) -> dict[str, int] | None:
        """Returns the option of each job in the incumbent of the MILP.

        Returns None without an incumbent, or where options train several jobs.
        """
        values = self.highs.getSolution().col_value
        if len(values) == 0 or self.problem.is_fused:
            return None
        chosen: dict[int, list[int]] = {}
        for i, column in enumerate(self.options):
            chosen.setdefault(column.job, []).extend([column.option] * round(values[self._first_option + i]))
        if any(len(chosen[jobs[0]]) < len(jobs) for jobs in self.classes):
            return None
        return {
            self.problem.jobs[j].id: k for jobs in self.classes for j, k in zip(jobs, chosen[jobs[0]], strict=False)
        }

    @property
    def length(self) -> float:
        """T of the solution, in units of `unit_s`."""
        return float(self.highs.getSolution().col_value[0])

    def work_by_kind(self) -> list[dict[str, tuple[float, float]]]:
        """Returns, for each class, the jobs' worth of work on each type of devices, and the time of it, in the LP."""
        values = self.highs.getSolution().col_value
        by_class: list[dict[str, tuple[float, float]]] = [{} for _ in self.classes]
        for i, column in enumerate(self.options):
            time = values[self._first_option + i]
            if time > 0.0:
                work, before = by_class[column.rows[0]].get(column.kind, (0.0, 0.0))
                by_class[column.rows[0]][column.kind] = (work + time / column.seconds, before + time)
        return by_class

    def limit_work(self, row: int, kind: str, most: float) -> None:
        """Lets nodes of a type do at most the work of `most` jobs of a class."""
        own = [i for i, c in enumerate(self.options) if c.rows[0] == row and c.kind == kind]
        entries = [1.0 / self.options[i].seconds for i in own]
        self.highs.addRow(-math.inf, most, len(own), [self._first_option + i for i in own], entries)

    def drop_limit(self) -> None:
        """Takes back the last limit of `limit_work`."""
        self.highs.deleteRows(1, [self.highs.getNumRow() - 1])

    def charge_elsewhere(self, row: int, kind: str, price: float) -> None:
        """Adds a price to the time of a class on other types than `kind`."""
        for i, column in enumerate(self.options):
            if column.rows[0] == row and column.kind != kind:
                self.highs.changeColCost(self._first_option + i, price)
