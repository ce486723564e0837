"""Planning of problems with fused groups: divides the jobs into groups, and plans each group as one job.

Some options train several jobs at once, so jobs are divided into groups before they are planned (`divisions`). Each
group becomes one job of an ordinary problem (`Contraction`). Its segments are then assigned to the options that they
stand for. The bound is that of the fused problem, so the gap includes what the choice of division may have lost.
"""

import time
from dataclasses import replace
from typing import Protocol

from ringmaster.errors import NoRoomError, ProblemError
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound, rigid_bound
from ringmaster.tasks.planning.groups.divisions import Division, DivisionEstimate, Divisions
from ringmaster.tasks.planning.objectives import Objective
from ringmaster.tasks.planning.plan_search import MAX_DEVICES_OF_MILP, MAX_JOBS_OF_MILP, WORTH_S
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.work import WorkBudget

EFFORT, DEAR, CHEAP = 12, 4, 1  # limit in total; effort of a division that takes seconds to plan, and of another one
GAIN = 1e-3  # minimum possible gain of a division that is planned, as a share of the best plan
SAME_VALUE = 1e-6  # relative difference of objectives that count as equal
LEAST_GAIN = 1e-3  # minimum gain of fusing, as a share of the objective; below it, jobs stay alone
ENOUGH_TO_TELL = 5e-3  # `enough` of the plan with every job alone, where it only serves to report the saving
SHARE_OF_FIRST, SHARE_OF_ALONE = 0.4, 0.5  # of the work that is left


class Solve(Protocol):
    """Plans an ordinary problem. Raises ProblemError where its deadlines cannot be met."""

    def __call__(self, problem: Problem, *, work: WorkBudget, enough: float = 0.0) -> Plan:
        """Returns the best plan found.

        enough: the search stops when the plan is above its bound by at most this share of the bound.
        """


def solve_fused(problem: Problem, solve: Solve, *, work: WorkBudget, preemption: str, objective: Objective) -> Plan:
    """Returns the best plan found over divisions into groups. Raises ProblemError where deadlines are not met."""
    search = FusedSearch(problem, solve, work=work, preemption=preemption, objective=objective)
    search.run()
    return search.proved()


class FusedSearch:
    """Plans divisions in the order of their estimates.

    alone: the plan of the problem without fused options, every job alone; None where it was not planned or no plan was
        found.
    """

    def __init__(
        self, problem: Problem, solve: Solve, *, work: WorkBudget, preemption: str, objective: Objective
    ) -> None:
        self.problem, self.solve, self.preemption, self.objective = problem, solve, preemption, objective
        self.work = work
        self.best: Plan | None = None
        self.best_value, self.took_s = float("inf"), 0.0
        self.best_division: Division = frozenset()
        self.alone: Plan | None = None
        self.faults: tuple[str, ...] = ()
        self._tried: list[DivisionEstimate] = []
        self._divisions = Divisions(problem, objective=objective, is_preemptive=preemption != "never", work=work)

    def run(self, *, with_alone: bool = False) -> None:
        """Searches for the best plan.

        with_alone: also plan the division with every job alone, even if it cannot be the best.
        """
        began = time.monotonic()
        self.bound = preemptive_bound(self.problem)
        by_value, by_promise = self._divisions.search(self.bound)
        self.seconds = {"division": round(time.monotonic() - began, 3)}
        alone = self._divisions.estimate(self._divisions.alone)
        assert alone is not None, "single jobs wait for each other as in the problem"
        self._plan_best_of(by_value[:1], share=SHARE_OF_FIRST)
        if with_alone:
            is_beaten = self.best_value < alone.promise * (1 - LEAST_GAIN)
            enough = ENOUGH_TO_TELL if is_beaten else 0.0
            self._plan(alone, share=SHARE_OF_ALONE, enough=enough)
        self._plan_best_of([estimate for pair in zip(by_value, by_promise, strict=True) for estimate in pair])
        self._plan_best_of([alone])  # never worse than without fusing
        self._part_idle_groups()

    def proved(self) -> Plan:
        """Returns the best plan with the bound of the fused problem. Raises ProblemError if no plan was found."""
        if self.best is None:
            from ringmaster.tasks.planning.bounds.deadlines import conflicts

            raise ProblemError([*conflicts(self.problem)] or self.faults)
        plan = replace(
            self.best,
            lower_bound_s=min(self.bound.seconds, self.best.makespan_s),
            certificate=self.bound.certificate,
            proof=self.bound.proof,
            solver_bound_s=None,  # of one division
            solver="",
            seconds={**self.seconds, **self.best.seconds},
        )
        if self.preemption == "never":
            limits = {"work_s": min(5.0, self.work.left_s), "time_limit_s": self.work.time_left_s}
            rigid_s, _ = rigid_bound(self.problem, **limits)
            if rigid_s > self.bound.seconds:
                plan = replace(plan, solver_bound_s=min(rigid_s, plan.makespan_s), solver="pattern MILP")
        return self.objective.valued(plan, self.problem, self.bound)

    def _plan_best_of(self, looks: list[DivisionEstimate], *, share: float = 1.0) -> None:
        """Plans divisions in the given order as long as the next one could be better.

        share: of the work that is left, for each division.
        """
        effort = 0
        for estimate in looks:
            if estimate in self._tried or estimate.promise >= self.best_value * (1 - GAIN):
                continue
            effort += DEAR if _is_dear(estimate) else CHEAP
            if effort > EFFORT or (self.best and self.work.left_s < self.took_s):
                return
            self._plan(estimate, share=share)

    def _part_idle_groups(self) -> None:
        """Breaks up each group of the best plan without which a simple list schedule is as good."""
        at_most = self.best_value * (1 + SAME_VALUE)
        for group in sorted(self.best_division, key=sorted):
            if len(group) > 1 and not self.work.is_over():
                estimate = self._divisions.estimate(self._divisions.division(self.best_division - {group}))
                if estimate and estimate.listed and estimate.late_s <= 0 and estimate.list_value <= at_most:
                    self._take(estimate, estimate.listed)

    def _plan(self, estimate: DivisionEstimate, *, share: float = 1.0, enough: float = 0.0) -> None:
        if estimate in self._tried:
            return
        self._tried.append(estimate)
        problem = estimate.contracted.problem
        try:
            with self.work.part(share) as work:
                found = self.solve(problem, work=work, enough=enough)
        except (ProblemError, NoRoomError) as error:
            self.faults = getattr(error, "faults", (str(error),))
            return
        finally:
            self.took_s = max(self.took_s, work.spent_s)
        is_listed_better = self.objective.value(found, problem) > estimate.list_value
        if is_listed_better and estimate.listed and estimate.late_s <= 0:
            found = _proving(found, estimate.listed, value=estimate.list_value)
        if not estimate.num_fused:
            self.alone = found
        if self.objective.value(found, problem) < self.best_value:
            self._take(estimate, found)

    def _take(self, estimate: DivisionEstimate, plan: Plan) -> None:
        """Stores a plan of a division as the best one."""
        num_groups = sum(bool(job.members) for job in estimate.contracted.problem.jobs)
        said = f"{plan.method}, {num_groups} fused groups" if num_groups else plan.method
        segments = estimate.contracted.expanded(plan, self.problem)
        self.best = replace(plan, segments=segments, method=said)
        self.best_value = self.objective.value(self.best, self.problem)
        self.best_division = estimate.division


def _is_dear(estimate: DivisionEstimate) -> bool:
    """Whether planning a division takes seconds rather than milliseconds."""
    problem = estimate.contracted.problem
    is_small = len(problem.jobs) <= MAX_JOBS_OF_MILP and problem.num_devices <= MAX_DEVICES_OF_MILP
    return is_small or estimate.list_value - estimate.promise > WORTH_S


def _proving(found: Plan, better: Plan, *, value: float) -> Plan:
    """Returns the better plan, which has that value, with the bounds and proofs of the plan that was found."""
    lower_s = None if found.lower_bound_s is None else min(found.lower_bound_s, better.makespan_s)
    solver_s = None if found.solver_bound_s is None else min(found.solver_bound_s, better.makespan_s)
    plan = replace(found, segments=better.segments, method=better.method, lower_bound_s=lower_s)
    plan = replace(plan, solver_bound_s=solver_s)
    if plan.value is None:
        return plan
    return replace(plan, value=value, value_bound=None if plan.value_bound is None else min(plan.value_bound, value))
