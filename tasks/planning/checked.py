"""Plans that the independent verifier has checked."""

from __future__ import annotations

from ringmaster.tasks.planning.fusion import Fusion, choose_groups
from ringmaster.tasks.planning.plan import Plan
from ringmaster.tasks.planning.problem import Problem
from ringmaster.tasks.planning.search import Objective
from ringmaster.tasks.planning.solve import solve
from ringmaster.tasks.planning.taking_over import taken_over
from ringmaster.tasks.planning.verify import verify


def checked_plan(
    problem: Problem, *, time_limit_s: float, seed: int, objective: Objective = "makespan", start: Plan | None = None
) -> Plan:
    """Solves the problem and has the plan checked by the independent verifier. Raises ProblemError as `solve` does.

    start: a plan of a problem that differs from this one in trifles, which is taken over where it is as good for this.
    """
    plan = None if start is None else taken_over(start, problem, objective=objective)
    if plan is None:
        plan = solve(problem, time_limit_s=time_limit_s, seed=seed, objective=objective)
    return _checked(plan, problem)


def checked_fusion(problem: Problem, *, time_limit_s: float, seed: int, objective: Objective = "makespan") -> Fusion:
    """Chooses groups and has their plan checked by the independent verifier. Raises ProblemError as `solve` does."""
    fusion = choose_groups(problem, time_limit_s=time_limit_s, seed=seed, objective=objective)
    _checked(fusion.together, problem)
    return fusion


def _checked(plan: Plan, problem: Problem) -> Plan:
    faults = verify(plan, problem)
    assert not faults, f"the planner made an invalid plan of {problem.name}: {'; '.join(faults)}"
    return plan
