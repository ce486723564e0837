"""Explanations of infeasible deadlines: which jobs conflict, and by how many seconds."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ringmaster.tasks.planning.bounds.bounds import by_area, costs_of, pattern_bound
from ringmaster.tasks.planning.bounds.job_costs import earliest_ends_s, in_order, shortest_of
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningJob
from ringmaster.tasks.planning.problems.reductions import only

MAX_LOOKED_AT = 1_000  # limit of jobs x deadlines that are checked: half a second
MAX_TRIALS = 200  # subsets of jobs that are checked to find a small one that conflicts
SAME = 1e-6  # share of a deadline within which a bound proves nothing


def conflicts(problem: Problem) -> Iterator[str]:
    """Yields messages about deadlines that provably no plan can meet, each with the seconds of its proof.

    A single job is infeasible by its release, the jobs that it waits for and its fastest option. Several jobs conflict
    if the lower bound of the jobs due by some time exceeds that time, on nodes with limited availability. The message
    names a small subset that still conflicts. A job that others wait for is due early enough for those.
    """
    if (departure := _departure(problem)) is not None:
        yield departure
        return
    ends = earliest_ends_s(problem)
    alone = [job for job in problem.jobs if job.deadline_s is not None and ends[job.id] > job.deadline_s * (1 + SAME)]
    for job in alone:
        yield (
            f"job {job.id}: cannot end before {ends[job.id]:.1f} s, its deadline is {job.deadline_s} s: "
            f"{ends[job.id] - (job.deadline_s or 0.0):.1f} s too late"
        )
    if not alone:
        yield from _joint_conflicts(problem)


def unmet(plan: Plan, problem: Problem) -> str:
    """Returns the message for the case where no plan meets all deadlines, but none is proved infeasible."""
    late = []
    for job in problem.jobs:
        end_s = max((s.end_s for s in plan.segments if _does(s.job, s.option, job, problem)), default=0.0)
        if job.deadline_s is not None and end_s > job.deadline_s:
            late.append(f"{job.id} ({end_s - job.deadline_s:.1f} s after {job.deadline_s} s)")
    return f"no plan was found that meets all deadlines: the best one ends jobs late: {', '.join(late)}"


def _does(owner: str, option: int, job: PlanningJob, problem: Problem) -> bool:
    return owner == job.id or job.id in problem.job(owner).options[option].jobs


def _departure(problem: Problem) -> str | None:
    """Returns a message if it is proved that nodes become unavailable before all work is done, or None."""
    if all(node.available_until_s is None for node in problem.nodes):
        return None
    names = [job.id for job in problem.jobs]
    if math.isfinite(_needed_s(problem, names)):
        return None
    few = _fewer(names, lambda some: math.isinf(_needed_s(problem, some)))
    last_s = max(node.available_until_s or 0.0 for node in problem.nodes)
    needed = sum(costs_of(by_area(problem), problem)[name] for name in few)
    there = sum(node.num_devices * (node.available_until_s or 0.0) for node in problem.nodes)
    missing = f", {needed - there:.1f} more than the nodes give" if needed > there else ""
    return (
        f"jobs {_listed(few)}: cannot all be done before the nodes go away, the last one at {last_s} s: they take at "
        f"least {needed:.1f} device-seconds{missing}"
    )


def _joint_conflicts(problem: Problem) -> Iterator[str]:
    """Yields the conflicts of the first due time that jobs together exceed, and of the one that they exceed most."""
    due = _due_s(problem)
    times = sorted(set(due.values()))
    step = max(1, -(-len(times) // max(1, MAX_LOOKED_AT // len(problem.jobs))))
    missing: dict[float, float] = {}
    for due_s in sorted({*times[::step], *times[-1:]}):
        missing_s = _needed_s(problem, _due_by(problem, due, due_s)) - due_s
        if missing_s > SAME * due_s:
            missing[due_s] = missing_s
    if missing:
        first_s, worst_s = next(iter(missing)), max(missing, key=lambda due_s: missing[due_s])
        for due_s in dict.fromkeys((first_s, worst_s)):
            yield _joint_conflict(problem, _due_by(problem, due, due_s), due_s, missing[due_s])


def _joint_conflict(problem: Problem, names: Sequence[str], due_s: float, missing_s: float) -> str:
    few = _fewer(names, lambda some: _needed_s(problem, some) > due_s * (1 + SAME))
    few_s = _needed_s(problem, few)
    every = "" if len(few) == len(names) else f"; all {len(names)} jobs due by then miss {missing_s:.1f} s"
    return (
        f"jobs {_listed(few)}: cannot all end by {due_s} s: together they need at least {few_s:.1f} s, "
        f"{few_s - due_s:.1f} s more{every}"
    )


def _due_by(problem: Problem, due: Mapping[str, float], due_s: float) -> list[str]:
    return [job.id for job in problem.jobs if due.get(job.id, math.inf) <= due_s]


def _due_s(problem: Problem) -> dict[str, float]:
    """Returns when each job must end to meet all deadlines, its own and those of jobs that wait for it."""
    shortest = shortest_of(problem)
    due = {job.id: job.deadline_s for job in problem.jobs if job.deadline_s is not None}
    for job in reversed(list(in_order(problem))):
        if job.id in due:
            for other in job.after:
                due[other] = min(due.get(other, math.inf), due[job.id] - shortest[job.id])
    return due


def _needed_s(problem: Problem, names: Collection[str]) -> float:
    """Returns a lower bound in seconds on plans of these jobs alone."""
    some = only(problem, set(names))
    undated = tuple(replace(job, deadline_s=None) for job in some.jobs)  # jobs that then are alike share columns
    return pattern_bound(replace(some, jobs=undated)).seconds


def _fewer(names: Sequence[str], is_conflict: Callable[[Sequence[str]], bool]) -> list[str]:
    """Returns a small subset of the names that still conflicts.

    Halves, then quarters and so on are removed as long as the rest conflicts.
    """
    left, size, trials = list(names), len(names) // 2, 0
    while size >= 1:
        start = 0
        while start < len(left) and trials < MAX_TRIALS:
            trial = left[:start] + left[start + size :]
            trials += 1
            if trial and is_conflict(trial):
                left = trial
            else:
                start += size
        size //= 2
    return left


def _listed(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
