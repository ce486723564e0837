"""Fused groups: some options train several jobs at once, so jobs are divided into groups before they are planned.

Each group becomes one job of an ordinary problem (`contraction`), which is planned as usual, and its segments are put
back under the options that they stand for. Which divisions are planned is for `divisions` to say. The bound is the
fused problem's own, so the gap tells what the division may have lost.
"""

import time
from dataclasses import replace
from typing import Protocol

from ringmaster.tasks.planning.bounds import preemptive_bound, rigid_bound
from ringmaster.tasks.planning.clock import clock
from ringmaster.tasks.planning.divisions import Division, Divisions, Outlook, value_bound
from ringmaster.tasks.planning.listing import NoRoomError
from ringmaster.tasks.planning.plan import Plan
from ringmaster.tasks.planning.problem import Problem, ProblemError
from ringmaster.tasks.planning.search import MAX_DEVICES_OF_MILP, MAX_JOBS_OF_MILP, WORTH_S
from ringmaster.tasks.planning.verify import objective_value

EFFORT, DEAR, CHEAP = 12, 4, 1  # in all, and of a division by whether planning it takes seconds
GAIN = 1e-3  # that a division must promise, as a share of the best plan, to be planned
SAME_VALUE = 1e-6  # a share by which objectives may differ and count as equal
LEAST_GAIN = 1e-3  # of the objective, below which jobs stay alone
ENOUGH_TO_TELL = 5e-3  # of the plan with every job alone, where it is only told what being fused saves
SHARE_OF_FIRST, SHARE_OF_ALONE = 0.4, 0.5  # of the time that is left


class Solve(Protocol):
    """Plans an ordinary problem; raises ProblemError where its deadlines cannot be met."""

    def __call__(self, problem: Problem, *, time_limit_s: float, enough: float = 0.0) -> Plan:
        """The best plan found; enough: a share of its bound that is no more looked for."""


def solve_fused(problem: Problem, solve: Solve, *, time_limit_s: float, preemption: str, objective: str) -> Plan:
    """The best plan found over divisions of the jobs into groups. Raises ProblemError where no deadlines are met."""
    search = FusedSearch(problem, solve, time_limit_s=time_limit_s, preemption=preemption, objective=objective)
    search.run()
    return search.proved()


class FusedSearch:
    """Plans divisions in the order of how good they look.

    alone: the plan with every job by itself, of the problem without fused options; None where that was not planned, or
    no plan was found.
    """

    def __init__(self, problem: Problem, solve: Solve, *, time_limit_s: float, preemption: str, objective: str) -> None:
        self.problem, self.solve, self.preemption, self.objective = problem, solve, preemption, objective
        self.ends_at = clock() + time_limit_s
        self.best: Plan | None = None
        self.best_value, self.took_s = float("inf"), 0.0
        self.best_division: Division = frozenset()
        self.alone: Plan | None = None
        self.faults: tuple[str, ...] = ()
        self._tried: list[Outlook] = []
        self._divisions = Divisions(
            problem, objective=objective, is_preemptive=preemption != "never", is_over=self._is_over
        )

    def run(self, *, with_alone: bool = False) -> None:
        """Looks for the best plan. with_alone: every job by itself is planned too, whether or not it may be best."""
        began = time.monotonic()
        self.bound = preemptive_bound(self.problem)
        by_value, by_promise = self._divisions.search(self.bound, time_limit_s=0.2 * self._left_s())
        self.seconds = {"division": round(time.monotonic() - began, 3)}
        alone = self._divisions.outlook(self._divisions.alone)
        assert alone is not None, "jobs that are not fused wait as they did"
        self._plan_best_of(by_value[:1], share=SHARE_OF_FIRST)
        if with_alone:
            is_beaten = self.best_value < alone.promise * (1 - LEAST_GAIN)
            enough = ENOUGH_TO_TELL if is_beaten else 0.0
            self._plan(alone, time_limit_s=SHARE_OF_ALONE * self._left_s(), enough=enough)
        self._plan_best_of([outlook for pair in zip(by_value, by_promise, strict=True) for outlook in pair])
        self._plan_best_of([alone])  # never worse than without fusing
        self._part_idle_groups()

    def proved(self) -> Plan:
        """The best plan with the bound of the fused problem."""
        if self.best is None:
            from ringmaster.tasks.planning.deadlines import conflicts

            raise ProblemError([*conflicts(self.problem)] or self.faults)
        lower_s, proof = self.bound.seconds, self.bound.proof
        certificate = self.bound.certificate
        if self.preemption == "never":
            rigid_s, _ = rigid_bound(self.problem, time_limit_s=min(5.0, self._left_s()))
            if rigid_s > lower_s:
                lower_s, certificate, proof = rigid_s, None, "pattern MILP"
        plan = replace(
            self.best,
            lower_bound_s=min(lower_s, self.best.makespan_s),
            certificate=certificate,
            proof=proof,
            seconds={**self.seconds, **self.best.seconds},
        )
        if self.objective == "makespan":
            return plan
        bound = min(value_bound(self.problem, self.bound, self.objective), self.best_value)
        return replace(plan, objective=self.objective, value=self.best_value, value_bound=bound)

    def _left_s(self) -> float:
        return max(0.1, self.ends_at - clock())

    def _is_over(self) -> bool:
        return clock() > self.ends_at

    def _plan_best_of(self, looks: list[Outlook], *, share: float = 1.0) -> None:
        """Plans divisions as long as the next one could be better. share: of the time that is left, for each."""
        effort = 0
        for outlook in looks:
            if outlook in self._tried or outlook.promise >= self.best_value * (1 - GAIN):
                continue
            began = clock()
            effort += DEAR if _is_dear(outlook) else CHEAP
            if effort > EFFORT or (self.best and self._left_s() < self.took_s):
                return
            self._plan(outlook, time_limit_s=share * self._left_s())
            self.took_s = max(self.took_s, clock() - began)

    def _part_idle_groups(self) -> None:
        """Breaks up the groups of the best plan without which a simple list is as good."""
        at_most = self.best_value * (1 + SAME_VALUE)
        for group in sorted(self.best_division, key=sorted):
            if len(group) > 1 and not self._is_over():
                outlook = self._divisions.outlook(self._divisions.division(self.best_division - {group}))
                if outlook and outlook.listed and outlook.late_s <= 0 and outlook.list_value <= at_most:
                    self._take(outlook, outlook.listed)

    def _plan(self, outlook: Outlook, *, time_limit_s: float, enough: float = 0.0) -> None:
        if outlook in self._tried:
            return
        self._tried.append(outlook)
        problem = outlook.contracted.problem
        try:
            found = self.solve(problem, time_limit_s=time_limit_s, enough=enough)
        except (ProblemError, NoRoomError) as error:
            self.faults = getattr(error, "faults", (str(error),))
            return
        is_listed_better = objective_value(found, problem, self.objective) > outlook.list_value
        if is_listed_better and outlook.listed and outlook.late_s <= 0:
            found = _proving(found, outlook.listed, value=outlook.list_value)
        if not outlook.num_fused:
            self.alone = found
        if objective_value(found, problem, self.objective) < self.best_value:
            self._take(outlook, found)

    def _take(self, outlook: Outlook, plan: Plan) -> None:
        """Keeps a plan of a division as the best one."""
        num_groups = sum(bool(job.fellows) for job in outlook.contracted.problem.jobs)
        said = f"{plan.method}, {num_groups} fused groups" if num_groups else plan.method
        segments = outlook.contracted.expanded(plan, self.problem)
        self.best = replace(plan, segments=segments, method=said)
        self.best_value = objective_value(self.best, self.problem, self.objective)
        self.best_division = outlook.division


def _is_dear(outlook: Outlook) -> bool:
    """Whether planning a division takes seconds, where others take milliseconds."""
    problem = outlook.contracted.problem
    is_small = len(problem.jobs) <= MAX_JOBS_OF_MILP and problem.num_devices <= MAX_DEVICES_OF_MILP
    return is_small or outlook.list_value - outlook.promise > WORTH_S


def _proving(found: Plan, better: Plan, *, value: float) -> Plan:
    """A better plan, of that value, with what proves the bounds of the one that was found."""
    lower_s = None if found.lower_bound_s is None else min(found.lower_bound_s, better.makespan_s)
    plan = replace(found, segments=better.segments, method=better.method, lower_bound_s=lower_s)
    if plan.value is None:
        return plan
    return replace(plan, value=value, value_bound=None if plan.value_bound is None else min(plan.value_bound, value))
