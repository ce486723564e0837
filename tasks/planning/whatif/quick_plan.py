"""A plan of a changed problem in a tenth of a second: it makes the least that a change gains certain at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringmaster.tasks.planning.bounds.bounds import Bound, preemptive_bound
from ringmaster.tasks.planning.groups.fusion import contracted, groups_of
from ringmaster.tasks.planning.objectives.makespan import MAKESPAN
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.plans.verify import verify
from ringmaster.tasks.planning.problems.folding import folded, is_foldable
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.terms import without_deadlines
from ringmaster.tasks.planning.search import WORTH_S
from ringmaster.tasks.planning.work import WorkBudget

WORK_S = 0.03  # of annealing between groups
EFFORT = 0.01  # of the last local search
METHOD = "quick plan"


def quick_plan(problem: Problem, *, bound: Bound, start: Plan, before: Problem) -> Plan | None:
    """Returns the best plan that takes no search worth mentioning, checked by the verifier; None where there is none.

    bound: the problem's own; without its prices, nothing is planned.
    start: a plan of the problem as it was before; the new plan has its groups of jobs.

    Where `start`, without jobs that are gone, could be improved by a few seconds at most, it is the plan: compiled code
    would take longer to load than it could gain.
    """
    plans = list(_valid([_kept(start, problem, before)], problem))
    best_s = min((plan.makespan_s for plan in plans), default=start.makespan_s)
    if bound.certificate is not None and best_s - bound.seconds > WORTH_S:
        plans += _valid([_planned(problem, bound, start, before, due_s=best_s)], problem)
    return min(plans, key=lambda plan: plan.makespan_s, default=None)


def _kept(start: Plan, problem: Problem, before: Problem) -> Sequence[Segment]:
    """Returns the segments of the jobs that are still there; none where options were moved between jobs."""
    if any(before.job(job.id).options != job.options for job in problem.jobs):
        return ()
    left = {job.id for job in problem.jobs}
    return tuple(segment for segment in start.segments if segment.job in left)


def _planned(problem: Problem, bound: Bound, start: Plan, before: Problem, *, due_s: float) -> Sequence[Segment]:
    """Returns the segments of a preemptive plan that is hardly polished; none where its rules are not modelled."""
    from ringmaster.tasks.planning.plans.retiming import retimed
    from ringmaster.tasks.planning.preemptive.preemptive import plan_preemptive

    if problem.is_fused:
        return _planned_groups(problem, start, before, due_s=due_s)
    # No plan worth having ends after `start`, so deadlines after it are none.
    slack = tuple(job.id for job in problem.jobs if job.deadline_s is not None and job.deadline_s >= due_s)
    undated = without_deadlines(problem, slack) if slack else problem
    if not is_foldable(undated) or not 0 < bound.seconds < float("inf"):
        return ()
    alike = folded(undated)
    found = plan_preemptive(alike, bound, work=WorkBudget(WORK_S), effort=EFFORT)
    if found and alike is not undated:
        found = retimed(undated, found, objective=MAKESPAN)
    return found or ()


def _planned_groups(problem: Problem, start: Plan, before: Problem, *, due_s: float) -> Sequence[Segment]:
    """Returns the segments of a plan with the groups of `start`, less the jobs that are gone."""
    left = {job.id for job in problem.jobs}
    groups = {}
    try:
        for lead, members in groups_of(start, before).items():
            names = [name for name in (lead, *members) if name in left]
            if len(names) > 1:
                groups[names[0]] = tuple(names[1:])
        found = contracted(problem, groups)
    except ValueError:  # the groups changed during the plan, or no option trains the rest of one
        return ()
    own = preemptive_bound(found.problem)
    segments = _planned(found.problem, own, start, before, due_s=due_s)
    return found.expanded(Plan(problem.name, tuple(segments)), problem) if segments else ()


def _valid(rows: Sequence[Sequence[Segment]], problem: Problem) -> Iterator[Plan]:
    for segments in rows:
        plan = Plan(problem.name, tuple(segments), method=METHOD)
        if segments and not verify(plan, problem):
            yield plan
