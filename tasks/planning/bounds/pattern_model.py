"""The pattern program in HiGHS: its solutions, dual prices, and rows that are added between solutions."""

import math
from typing import Any

import pulp

from ringmaster.tasks.planning.bounds.pattern_program import PatternProgram
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.problem import Problem

MAX_NODES = 3_000  # of a MILP's branch-and-bound tree
NODE_S = 2.5e-5  # work of a node, per column
FIRST_OPTION = 1  # the index of the column of the first option, after that of T


class PatternModel:
    """The pattern LP or MILP of a problem, loaded into HiGHS (`PatternProgram` states it)."""

    def __init__(self, problem: Problem, *, unit_s: float, is_integer: bool = False) -> None:
        self.problem, self.unit_s, self.is_integer = problem, unit_s, is_integer
        self.classes = problem.classes
        self._program = PatternProgram(problem, unit_s=unit_s, is_integer=is_integer)
        self._options = self._program.options
        # PuLP's own `solve` knows no status for a limit in nodes, and builds the program again for each change.
        solver = pulp.HiGHS(msg=False, threads=1, random_seed=0)
        solver.createAndConfigureSolver(self._program.pulp_problem)
        solver.buildSolverModel(self._program.pulp_problem)
        self.highs: Any = self._program.pulp_problem.solverModel

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return self._program.num_columns

    def solve(self, *, work_s: float = 5.0, time_limit_s: float = 300.0) -> bool:
        """Runs the solver and returns whether it ended with an optimum.

        work_s: limit of a MILP's work on a quiet machine, as a number of nodes, which is the same at any load.
        time_limit_s: limit by the wall clock.
        """
        import highspy

        self.highs.setOptionValue("time_limit", max(0.01, time_limit_s))
        if self.is_integer:
            max_nodes = work_s / (NODE_S * self.num_columns)
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
        for (kind, slot), row in self._program.slots.items():
            typed[kind][slot] = max(0.0, -float(duals[row]))
        own = {
            self.problem.jobs[j].id: -float(duals[row])
            for jobs, row in zip(self.classes, self._program.time, strict=True)
            for j in jobs
            if duals[row] < -1e-12
        }
        cover = {}
        if self.problem.is_fused:
            rows = zip(self.classes, self._program.work, strict=True)
            cover = {self.problem.jobs[j].id: max(0.0, float(duals[row])) for jobs, row in rows for j in jobs}
        quotas = {group: price for group, row in self._program.quota.items() if (price := -float(duals[row])) > 0}
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
        for i, column in enumerate(self._options):
            chosen.setdefault(column.job, []).extend([column.number] * round(values[FIRST_OPTION + i]))
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
        for i, column in enumerate(self._options):
            time = values[FIRST_OPTION + i]
            if time > 0.0:
                work, before = by_class[column.classes[0]].get(column.kind, (0.0, 0.0))
                by_class[column.classes[0]][column.kind] = (work + time / column.seconds, before + time)
        return by_class

    def limit_work(self, row: int, kind: str, most: float) -> None:
        """Lets nodes of a type do at most the work of `most` jobs of a class."""
        own = [i for i, c in enumerate(self._options) if c.classes[0] == row and c.kind == kind]
        entries = [1.0 / self._options[i].seconds for i in own]
        self.highs.addRow(-math.inf, most, len(own), [FIRST_OPTION + i for i in own], entries)

    def drop_limit(self) -> None:
        """Takes back the last limit of `limit_work`."""
        self.highs.deleteRows(1, [self.highs.getNumRow() - 1])

    def charge_elsewhere(self, row: int, kind: str, price: float) -> None:
        """Adds a price to the time of a class on other types than `kind`."""
        for i, column in enumerate(self._options):
            if column.classes[0] == row and column.kind != kind:
                self.highs.changeColCost(FIRST_OPTION + i, price)
