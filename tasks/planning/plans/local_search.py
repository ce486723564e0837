"""Hill climbing over list schedules, for very small problems, which need no compiled search, and for job order."""

import random
from collections.abc import Callable
from dataclasses import replace

from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning.bounds.dominance import useful_options
from ringmaster.tasks.planning.objectives.makespan import MAKESPAN
from ringmaster.tasks.planning.objectives.objective import Objective
from ringmaster.tasks.planning.plans.list_scheduling import Choice, schedule
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem

PLACEMENTS = 12_000  # placements of jobs on nodes, in all trials together: about a fifth of a second


def improve(
    problem: Problem,
    plan: Plan,
    *,
    bound_s: float,
    seed: int,
    is_over: Callable[[], bool],
    objective: Objective = MAKESPAN,
    placements: int = PLACEMENTS,
) -> Plan:
    """Returns the plan after random moves of (order of jobs, option of each), list-scheduled again after each move.

    The result is never worse than the given plan.
    """
    draw = random.Random(seed)
    options = {job.id: useful_options(job) for job in problem.jobs}
    now: list[Choice] = [(segment.job, segment.option) for segment in plan.segments]
    best, best_rank = plan, objective.rank(plan, problem)
    prices = objective.coefficients(problem).prices
    for _ in range(max(50, placements // len(now))):
        if (objective.only_last_end and best_rank[:2] <= (0.0, bound_s * (1 + 1e-6))) or is_over():
            break
        trial = _moved(list(now), draw, options)
        try:
            segments = schedule(problem, trial, prices=prices if prices and draw.random() < 0.7 else None)
        except NoRoomError:
            continue
        found = replace(plan, segments=segments)
        found_rank = objective.rank(found, problem)
        if found_rank <= best_rank:
            now, best, best_rank = trial, found, found_rank
    return replace(best, method=plan.method + " + local search")


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
