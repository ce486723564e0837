"""Planning with a check of every plan by the independent verifier.

A plan is reused for a problem that differs slightly, such as by the time left, from the problem it was made for. So a
batch follows the plan by which its groups were chosen. Nothing is searched twice, and no second search can end with a
worse plan than the first.
"""

from __future__ import annotations

from dataclasses import replace

from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.groups.fusion import Fusion, choose_groups
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plan_search import SAME
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.plans.retiming import retimed
from ringmaster.tasks.planning.plans.verify import verify
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.solve import solve


def taken_over(start: Plan, problem: Problem, *, objective: str) -> Plan | None:
    """Returns the plan with the best times for this problem, and with the problem's bound.

    Returns None where the plan is invalid for the problem, misses a deadline, or is worse by more than `SAME` than
    before.
    """
    rows = {job.id: len(job.options) for job in problem.jobs}
    names = {segment.job for segment in start.segments}
    if names != rows.keys() or any(segment.option >= rows[segment.job] for segment in start.segments):
        return None
    if not {name for s in start.segments for name, _ in s.devices} <= {node.id for node in problem.nodes}:
        return None
    chosen_objective = objective_by_name(objective)
    if (segments := retimed(problem, start.segments, objective=chosen_objective)) is None:
        return None
    plan = Plan(problem.name, segments, method=start.method, seconds=start.seconds)
    if verify(plan, problem):
        return None
    if chosen_objective.value(plan, problem) > (start.makespan_s if start.value is None else start.value) * (1 + SAME):
        return None
    return bounded(plan, problem, objective=objective)


def bounded(plan: Plan, problem: Problem, *, objective: str) -> Plan:
    """Returns a valid plan of the problem with the problem's own bound, value and certificate."""
    bound = preemptive_bound(problem)
    proved = replace(
        plan,
        lower_bound_s=min(bound.seconds, plan.makespan_s),
        certificate=bound.certificate,
        proof=bound.proof,
    )
    return objective_by_name(objective).valued(proved, problem, bound)


def checked_plan(
    problem: Problem, *, work_s: float, seed: int, objective: str = "makespan", start: Plan | None = None
) -> Plan:
    """Solves the problem and checks the plan with the independent verifier. Raises ProblemError as `solve` does.

    start: a plan of a slightly different problem, which is reused if it is as good for this one.
    """
    plan = None if start is None else taken_over(start, problem, objective=objective)
    if plan is None:
        plan = solve(problem, work_s=work_s, seed=seed, objective=objective)
    return _checked(plan, problem)


def checked_fusion(problem: Problem, *, work_s: float, seed: int, objective: str = "makespan") -> Fusion:
    """Chooses fused groups and checks their plan with the independent verifier. Raises ProblemError as `solve` does."""
    fusion = choose_groups(problem, work_s=work_s, seed=seed, objective=objective)
    _checked(fusion.together, problem)
    return fusion


def _checked(plan: Plan, problem: Problem) -> Plan:
    faults = verify(plan, problem)
    assert not faults, f"the planner made an invalid plan of {problem.name}: {'; '.join(faults)}"
    return plan
