"""The pattern program in PuLP: the LP that bounds every plan, and the MILP that bounds those without preemption.

A *pattern* is a way to divide one node into slots, such as 5 + 3 of 8 devices. Patterns are not enumerated, but
modelled as walks (`walk_steps`), so a node of any size costs G columns per slot size instead of one column per pattern.

Jobs that differ only in their id share rows and columns (`Problem.classes`), so a sweep costs as much as one of its
jobs.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pulp

from ringmaster.tasks.planning.bounds.job_costs import useful_groups, useful_options, whole_of
from ringmaster.tasks.planning.bounds.linear_program import walk_steps
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option

MAX_NODES = 3_000  # of a MILP's branch-and-bound tree
NODE_S = 2.5e-5  # work of a node, per column
FIRST_OPTION = 1  # the index of the column of the first option, after that of T


@dataclass(frozen=True)
class ClassOption:
    """An option of a class of equal jobs, on nodes of one device type.

    job: the first job of the class.
    number: the index of the option among those of the job.
    seconds: of a whole job, in units of `unit_s`.
    classes: the indices of the classes whose work it does; several for a fused group.
    """

    job: int
    number: int
    option: Option
    kind: str
    seconds: float
    classes: tuple[int, ...]


class PatternModel:
    """The program of a problem in HiGHS; times are in units of `unit_s`, so that the solver's tolerances always fit.

    Columns: T; y[c,o] the time of all jobs of class c under option o; x[g] the time that all nodes of group g are in
    use, where a group is the nodes of one type, size and end of availability; f[g,v,s] the time that nodes of group g
    step from position v by s devices (a slot, or 1 for a device left idle). With m[c] jobs in class c, it minimises T
    subject to

        work   sum_o y[c,o] / seconds[o]  >= m[c]                                 for each class c, over the
               options o that do its work: its own, and fused groups that include it
        time   sum_o y[c,o] - m[c] T      <= - m[c] release[c]                    for each class c, over the same
        quota  sum_{c,o of user} devices[o] y[c,o] - quota T <= 0                 for each user with a quota
        slots  sum_{c,o of slot s} nodes[o] y[c,o] - sum_{g,v} f[g,v,s]  <= 0     for each type and slot size s
        walk   sum_s f[g,v,s] - sum_s f[g,v-s,s] - (x[g] if v = 0 else 0) = 0     for each group g and position v
        nodes  x[g] - nodes[g] T          <= 0, x[g] <= nodes[g] end[g]           for each group g

    seconds[o] are those of the whole job in one segment under option o. In the LP of a problem with fused groups, they
    are those of the work alone. `certified_bound` recomputes what the prices prove where jobs have several segments.

    The MILP (`is_integer`) is a relaxation of every plan without preemption: y[c,o] is seconds[o] times an integer
    number of jobs. An option that takes longer than `unit_s` and has any job makes T at least as long.

    The first column is T, and those of the options follow.
    """

    def __init__(self, problem: Problem, *, unit_s: float, is_integer: bool = False) -> None:
        self.problem, self.unit_s, self.is_integer = problem, unit_s, is_integer
        self.classes = problem.classes
        self._options = _class_options(problem, unit_s=unit_s, is_integer=is_integer)
        self._program = pulp.LpProblem("patterns", pulp.LpMinimize)
        self.num_columns = self._num_rows = 0
        self._length = self._column()
        self._program += self._length
        # The jobs' worth of work under each option, and y.
        self._done: list[Any] = []
        self._y: list[Any] = []
        for option in self._options:
            if is_integer:
                num_jobs = self._column(upper=self._num_jobs(option), category=pulp.LpInteger)
                self._done.append(num_jobs)
                self._y.append(option.seconds * num_jobs)
            else:
                self._y.append(self._column())
                self._done.append(1.0 / option.seconds * self._y[-1])
        self._work: list[int] = []  # the index of the row of each class
        self._time: list[int] = []
        self._add_classes()
        self._quota = {user: self._quota_row(user, quota) for user, quota in problem.limits.items()}
        steps, in_use = self._walk_columns()
        self._slots = self._slot_rows(steps)
        self._add_nodes(steps, in_use)
        if is_integer:
            self._add_long_options()
        # PuLP's own `solve` knows no status for a limit in nodes, and builds the program again for each change.
        solver = pulp.HiGHS(msg=False, threads=1, random_seed=0)
        solver.createAndConfigureSolver(self._program)
        solver.buildSolverModel(self._program)
        self.highs: Any = self._program.solverModel

    def _column(self, *, upper: float | None = None, category: str = pulp.LpContinuous) -> Any:
        """Adds a column >= 0. PuLP orders columns by their names."""
        self.num_columns += 1
        return self._program.add_variable(f"x{self.num_columns:08}", 0, upper, category)

    def _row(self, constraint: Any) -> int:
        """Adds a row and returns its index."""
        self._program += constraint
        self._num_rows += 1
        return self._num_rows - 1

    def _num_jobs(self, option: ClassOption) -> int:
        return len(self.classes[option.classes[0]])

    def _add_classes(self) -> None:
        """The rows `work` and `time`."""
        of_class: dict[int, list[int]] = defaultdict(list)
        for i, option in enumerate(self._options):
            for c in option.classes:
                of_class[c].append(i)
        for c, jobs in enumerate(self.classes):
            release = self.problem.jobs[jobs[0]].release_s / self.unit_s
            done, time = (pulp.lpSum(of[i] for i in of_class[c]) for of in (self._done, self._y))
            self._work.append(self._row(done >= len(jobs)))
            self._time.append(self._row(time - len(jobs) * self._length <= -len(jobs) * release))

    def _quota_row(self, user: str, quota: int) -> int:
        own = (i for i, option in enumerate(self._options) if self.problem.jobs[option.job].user == user)
        return self._row(
            pulp.lpSum(self._options[i].option.num_devices * self._y[i] for i in own) <= quota * self._length
        )

    def _walk_columns(self) -> tuple[list[dict[tuple[int, int], Any]], list[Any]]:
        """Adds f[g,v,s] and x[g]; returns f of each group, by (v, s), and x, which is nodes T for nodes that stay."""
        slots: dict[str, set[int]] = defaultdict(set)
        for option in self._options:
            slots[option.kind].add(option.option.slot)
        steps, in_use = [], []
        for (kind, size, until_s), num_nodes in self.problem.node_groups.items():
            if until_s is None:
                in_use.append(num_nodes * self._length)
            else:
                in_use.append(self._column(upper=num_nodes * until_s / self.unit_s))
            steps.append({step: self._column() for step in walk_steps(size, slots[kind])})
        return steps, in_use

    def _slot_rows(self, steps: Sequence[dict[tuple[int, int], Any]]) -> dict[tuple[str, int], int]:
        using: dict[tuple[str, int], list[int]] = defaultdict(list)
        for i, option in enumerate(self._options):
            using[option.kind, option.option.slot].append(i)
        offered: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for (kind, *_), own in zip(self.problem.node_groups, steps, strict=True):
            for (_, slot), column in own.items():
                offered[kind, slot].append(column)
        rows = {}
        for key in sorted(using):
            used = pulp.lpSum(self._options[i].option.num_nodes * self._y[i] for i in using[key])
            rows[key] = self._row(used - pulp.lpSum(offered[key]) <= 0)
        return rows

    def _add_nodes(self, steps: Sequence[dict[tuple[int, int], Any]], in_use: Sequence[Any]) -> None:
        """The rows `walk` and `nodes`."""
        groups = self.problem.node_groups.items()
        for ((_, size, until_s), num_nodes), own, used in zip(groups, steps, in_use, strict=True):
            flow = [pulp.LpAffineExpression() for _ in range(size)]
            for (place, slot), column in own.items():
                flow[place] += column
                if (reached := place + max(1, slot)) < size:
                    flow[reached] -= column
            for place, out in enumerate(flow):
                self._row(out - used == 0 if place == 0 else out == 0)
            if until_s is not None:
                self._row(used - num_nodes * self._length <= 0)

    def _add_long_options(self) -> None:
        """M z >= n for the n of m jobs of a class under an option, and T >= seconds z, with z 0 or 1."""
        for i, option in enumerate(self._options):
            num_jobs = self._num_jobs(option)
            if num_jobs > 1 and option.seconds > 1.0:
                is_used = self._column(upper=1, category=pulp.LpInteger)
                self._row(self._done[i] - num_jobs * is_used <= 0)
                self._row(option.seconds * is_used - self._length <= 0)

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
        for (kind, slot), row in self._slots.items():
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
        quotas = {user: price for user, row in self._quota.items() if (price := -float(duals[row])) > 0}
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


def _class_options(problem: Problem, *, unit_s: float, is_integer: bool) -> list[ClassOption]:
    """Returns the options of all classes, on each type of devices that they may run on, those of groups last."""
    class_of = {problem.jobs[j].id: c for c, jobs in enumerate(problem.classes) for j in jobs}
    places = [(jobs[0], k) for jobs in problem.classes for k in useful_options(problem.jobs[jobs[0]])]
    options = []
    for j, k in [*places, *useful_groups(problem)]:
        job, option = problem.jobs[j], problem.jobs[j].options[k]
        is_lp_of_groups = problem.is_fused and not is_integer
        seconds = option.runtime_s if is_lp_of_groups else whole_of(job, k, problem.switch_cost_s)
        classes = tuple(class_of[name] for name in (job.id, *option.jobs))
        options += [ClassOption(j, k, option, kind, seconds / unit_s, classes) for kind in problem.types_of(option)]
    return options
