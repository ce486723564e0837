"""Hill climbing over list schedules, for very small problems, which need no compiled search, and for job order."""

import random
from collections.abc import Callable
from dataclasses import replace

from ringmaster.tasks.planning.bounds.dominance import useful_options
from ringmaster.tasks.planning.plans.list_scheduling import Choice, NoRoomError, schedule
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.plans.verify import objective_value
from ringmaster.tasks.planning.problems.problem import Problem

PLACEMENTS = 12_000  # placements of jobs on nodes, in all trials together: about a fifth of a second


def improve(
    problem: Problem,
    plan: Plan,
    *,
    bound_s: float,
    seed: int,
    is_over: Callable[[], bool],
    objective: str = "makespan",
    placements: int = PLACEMENTS,
) -> Plan:
    """Returns the plan after random moves of (order of jobs, option of each), list-scheduled again after each move.

    The result is never worse than the given plan.
    """
    draw = random.Random(seed)
    options = {job.id: useful_options(job) for job in problem.jobs}
    now: list[Choice] = [(segment.job, segment.option) for segment in plan.segments]
    best, best_rank = plan, rank(plan, problem, objective)
    for _ in range(max(50, placements // len(now))):
        if (objective == "makespan" and best_rank[:2] <= (0.0, bound_s * (1 + 1e-6))) or is_over():
            break
        trial = _moved(list(now), draw, options)
        try:
            segments = schedule(problem, trial, cheaply=objective == "cost" and draw.random() < 0.7)
        except NoRoomError:
            continue
        found = replace(plan, segments=segments)
        found_rank = rank(found, problem, objective)
        if found_rank <= best_rank:
            now, best, best_rank = trial, found, found_rank
    return replace(best, method=plan.method + " + local search")


def rank(plan: Plan, problem: Problem, objective: str) -> tuple[float, float, float]:
    """Returns a sort key, lower is better: total lateness in seconds, then the objective, then the makespan."""
    return (*value(plan.segments, problem, objective), plan.makespan_s)


def value(segments: tuple[Segment, ...], problem: Problem, objective: str) -> tuple[float, float]:
    """Returns the total lateness in seconds over all deadlines, and the objective."""
    plan = Plan(problem.name, segments)
    return lateness_s(plan, problem), objective_value(plan, problem, objective)


def lateness_s(plan: Plan, problem: Problem) -> float:
    """Returns the total seconds by which jobs end after their deadlines."""
    due = {job.id: job.deadline_s for job in problem.jobs if job.deadline_s is not None}
    if not due:
        return 0.0
    ends: dict[str, float] = {}
    for segment in plan.segments:
        ends[segment.job] = max(segment.end_s, ends.get(segment.job, 0.0))
    return sum(max(0.0, ends[job] - deadline_s) for job, deadline_s in due.items())


def _moved(choices: list[Choice], draw: random.Random, options: dict[str, tuple[int, ...]]) -> list[Choice]:
    """Moves one job in the list, swaps two jobs, or changes the option of one job."""
    i, j, kind = draw.randrange(len(choices)), draw.randrange(len(choices)), draw.randrange(4)
    if kind == 0:
        choices.insert(j, choices.pop(i))
    elif kind == 1:
        choices[i], choices[j] = choices[j], choices[i]
    else:
        choices[i] = (choices[i][0], draw.choice(options[choices[i][0]]))
    return choices
