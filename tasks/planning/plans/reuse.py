"""Reuse of a plan for a problem that differs slightly, such as by the time left, from the problem it was made for.

With it, a batch follows the plan by which its groups were chosen. Nothing is searched twice, and no second search can
end with a worse plan than the first.
"""

from __future__ import annotations

from dataclasses import replace

from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.objectives import registry
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.plans.retiming import retimed
from ringmaster.tasks.planning.plans.verify import verify
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.search import SAME


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
    minimised = registry.objective(objective)
    if (segments := retimed(problem, start.segments, objective=minimised)) is None:
        return None
    plan = Plan(problem.name, segments, method=start.method, seconds=start.seconds)
    if verify(plan, problem):
        return None
    if minimised.value(plan, problem) > (start.makespan_s if start.value is None else start.value) * (1 + SAME):
        return None
    bound = preemptive_bound(problem)
    proved = replace(
        plan,
        lower_bound_s=min(bound.seconds, plan.makespan_s),
        certificate=bound.certificate,
        proof=bound.proof,
    )
    return minimised.valued(proved, problem, bound)
