"""Plans for nodes that end: no segment outlasts its node, and each has time to write a checkpoint before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ringmaster.tasks.execution.engines.known_nodes import EMPTY_BEFORE_S
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.planning import Plan, Problem, ProblemError
from ringmaster.tasks.planning.plans.checked import bounded

HEED_S = 10.0
"""Time for the controller to notice that a node is about to end, and for its gangs to hear of it."""
SAFETY = 2.0  # checkpoints of several gangs share one storage


def empty_before_s(job_table: JobTable) -> float:
    """Returns how long before its end a node is emptied: the time for the current step and a checkpoint of any job.

    A fixed time before anything was measured.
    """
    profiles = [profile for job in job_table.left() for profile in job_table.profiles[job.name]]
    if not profiles:
        return EMPTY_BEFORE_S
    return HEED_S + SAFETY * max(profile.together_s + profile.save_s for profile in profiles)


def plan_before_ends(
    problem: Problem, *, ends_s: Mapping[str, float], objective: str, make_plan: Callable[[Problem], Plan]
) -> Plan:
    """Returns a plan in which no segment outlasts its node, with a bound and a certificate for `problem`.

    Where there is no such plan, because all nodes end before the jobs do, the plan is made as if nodes stayed: whoever
    executes it empties each node before its end, and the jobs wait for another one.

    ends_s: by node, the end of its last segment, in the time of the problem; nodes that stay are left out.
    make_plan: plans a problem. Raises ProblemError where there is no plan.
    """
    plan = make_plan(problem)
    if not any(
        segment.end_s > ends_s[node] for segment in plan.segments for node, _ in segment.devices if node in ends_s
    ):
        return plan
    nodes = tuple(
        replace(node, available_until_s=max(ends_s[node.id], 0.0)) if node.id in ends_s else node
        for node in problem.nodes
    )
    try:
        limited = make_plan(replace(problem, nodes=nodes))
    except ProblemError:
        return plan
    return bounded(limited, problem, objective=objective)
