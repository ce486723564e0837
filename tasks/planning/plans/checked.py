"""Planning with a check of every plan by the independent verifier."""

from __future__ import annotations

from ringmaster.tasks.planning.groups.fusion import Fusion, choose_groups
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.plans.reuse import taken_over
from ringmaster.tasks.planning.plans.verify import verify
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.solve import solve


def checked_plan(
    problem: Problem, *, time_limit_s: float, seed: int, objective: str = "makespan", start: Plan | None = None
) -> Plan:
    """Solves the problem and checks the plan with the independent verifier. Raises ProblemError as `solve` does.

    start: a plan of a slightly different problem, which is reused if it is as good for this one.
    """
    plan = None if start is None else taken_over(start, problem, objective=objective)
    if plan is None:
        plan = solve(problem, time_limit_s=time_limit_s, seed=seed, objective=objective)
    return _checked(plan, problem)


def checked_fusion(problem: Problem, *, time_limit_s: float, seed: int, objective: str = "makespan") -> Fusion:
    """Chooses fused groups and checks their plan with the independent verifier. Raises ProblemError as `solve` does."""
    fusion = choose_groups(problem, time_limit_s=time_limit_s, seed=seed, objective=objective)
    _checked(fusion.together, problem)
    return fusion


def _checked(plan: Plan, problem: Problem) -> Plan:
    faults = verify(plan, problem)
    assert not faults, f"the planner made an invalid plan of {problem.name}: {'; '.join(faults)}"
    return plan
