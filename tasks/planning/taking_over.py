"""A plan for a problem that differs in trifles, such as the time that is left, from the one that it was made for.

So a batch follows the very plan by which its groups were chosen: nothing is searched for twice, and no second search
can end with a worse plan than the first one.
"""

from __future__ import annotations

from dataclasses import replace

from ringmaster.tasks.planning.bounds import preemptive_bound
from ringmaster.tasks.planning.divisions import value_bound
from ringmaster.tasks.planning.plan import Plan
from ringmaster.tasks.planning.problem import Problem
from ringmaster.tasks.planning.retiming import retimed
from ringmaster.tasks.planning.search import SAME, Objective
from ringmaster.tasks.planning.verify import objective_value, verify


def taken_over(start: Plan, problem: Problem, *, objective: Objective) -> Plan | None:
    """The plan with the times that are best for this problem, and with its bound.

    None where it is no plan of this problem, misses a deadline, or is worse by more than `SAME` than it was.
    """
    rows = {job.id: len(job.options) for job in problem.jobs}
    names = {segment.job for segment in start.segments}
    if names != rows.keys() or any(segment.option >= rows[segment.job] for segment in start.segments):
        return None
    if not {name for s in start.segments for name, _ in s.devices} <= {node.id for node in problem.nodes}:
        return None
    if (segments := retimed(problem, start.segments, objective=objective)) is None:
        return None
    plan = Plan(problem.name, segments, method=start.method, seconds=start.seconds)
    if verify(plan, problem):
        return None
    value = objective_value(plan, problem, objective)
    if value > (start.makespan_s if start.value is None else start.value) * (1 + SAME):
        return None
    bound = preemptive_bound(problem)
    proved = replace(
        plan,
        lower_bound_s=min(bound.seconds, plan.makespan_s),
        certificate=bound.certificate,
        proof=bound.proof,
    )
    if objective == "makespan":
        return proved
    least = min(value_bound(problem, bound, objective), value)
    return replace(proved, objective=objective, value=value, value_bound=least)
