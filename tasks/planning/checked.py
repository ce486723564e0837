"""Plans that the independent verifier has checked."""

from __future__ import annotations

from tasks.planning.plan import Plan
from tasks.planning.problem import Problem
from tasks.planning.search import Objective
from tasks.planning.solve import solve
from tasks.planning.verify import verify


def checked_plan(problem: Problem, *, time_limit_s: float, seed: int, objective: Objective = "makespan") -> Plan:
    """Solves the problem and has the plan checked by the independent verifier. Raises ProblemError as `solve` does."""
    plan = solve(problem, time_limit_s=time_limit_s, seed=seed, objective=objective)
    faults = verify(plan, problem)
    assert not faults, f"the planner made an invalid plan of {problem.name}: {'; '.join(faults)}"
    return plan
