"""Plans for nodes that end: where the work allows it, no segment outlasts its node.

Whoever executes a plan empties each node before its end, whatever is planned there, so that its gangs have time to
write checkpoints.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ringmaster.tasks.execution.engines.known_nodes import EMPTY_BEFORE_S
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.planning import Plan, Problem, ProblemError
from ringmaster.tasks.planning.plans.checked_plans import bounded

logger = logging.getLogger(__name__)

HEED_S = 10.0
"""Time for the controller to notice that a node is about to end, and for its gangs to hear of it."""
SAFETY = 2.0  # checkpoints of several gangs share one storage
STAYING = 0.5
"""The share of the time of the node that stays longest, from which on nodes are planned as if they stayed, where the
work outlasts all nodes. Nodes that were lent at the same time end almost together, and share the work.
"""


def empty_before_s(job_table: JobTable) -> float:
    """Returns how long before its end a node is emptied: 10 s, and twice the longest step and checkpoint of any job.

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

    Where there is no such plan, because all nodes end before the jobs do, those that stay longest are planned as if
    they did not end, and the others as before. The jobs stop at checkpoints there, and continue on another node.

    ends_s: by node, the end of its last segment, in the time of the problem; nodes that stay are left out.
    make_plan: plans a problem. Raises ProblemError where there is no plan.
    """
    plan = make_plan(problem)
    if not any(
        segment.end_s > ends_s[node] for segment in plan.segments for node, _ in segment.devices if node in ends_s
    ):
        return plan
    longest_s = max(ends_s.get(node.id, math.inf) for node in problem.nodes)
    staying = {node for node, end_s in ends_s.items() if end_s >= STAYING * longest_s}
    for without in [set[str](), staying] if staying else [set[str]()]:
        try:
            limited = make_plan(_ending(problem, {node: s for node, s in ends_s.items() if node not in without}))
        except ProblemError:
            continue
        if without:
            logger.info(
                "jobs outlast all nodes: they stop at checkpoints on %s, and continue on others",
                ", ".join(sorted(staying)),
            )
        return bounded(limited, problem, objective=objective)
    logger.info("jobs outlast all nodes: they stop at checkpoints before their nodes end, and continue on others")
    return plan


def _ending(problem: Problem, ends_s: Mapping[str, float]) -> Problem:
    nodes = tuple(
        replace(node, available_until_s=max(ends_s[node.id], 0.0)) if node.id in ends_s else node
        for node in problem.nodes
    )
    return replace(problem, nodes=nodes)
