"""Hill climbing over lists: for problems so small that nothing needs compiling, and for jobs that wait for
others."""

import random
from collections.abc import Callable
from dataclasses import replace

from tasks.planning.bounds import useful_options
from tasks.planning.listing import Choice, makespan_s, schedule
from tasks.planning.plan import Plan
from tasks.planning.problem import Problem

PLACEMENTS = 12_000  # of jobs on nodes, in all trials together: about a fifth of a second


def improve(problem: Problem, plan: Plan, *, bound_s: float, seed: int, is_over: Callable[[], bool]) -> Plan:
    """The plan after moves of (order of jobs, option of each), re-scheduled as a list after each; never a
    worse one."""
    draw = random.Random(seed)
    options = {job.id: useful_options(job) for job in problem.jobs}
    now: list[Choice] = [(segment.job, segment.option) for segment in plan.segments]
    best, best_s = plan.segments, plan.makespan_s
    for _ in range(max(50, PLACEMENTS // len(now))):
        if best_s <= bound_s * (1 + 1e-6) or is_over():
            break
        trial = _moved(list(now), draw, options)
        segments = schedule(problem, trial)
        if makespan_s(segments) <= best_s:
            now, best, best_s = trial, segments, makespan_s(segments)
    return replace(plan, segments=best, method=plan.method + " + local search")


def _moved(choices: list[Choice], draw: random.Random, options: dict[str, tuple[int, ...]]) -> list[Choice]:
    """One job elsewhere in the list, two jobs swapped, or one job under another option."""
    i, j, kind = draw.randrange(len(choices)), draw.randrange(len(choices)), draw.randrange(4)
    if kind == 0:
        choices.insert(j, choices.pop(i))
    elif kind == 1:
        choices[i], choices[j] = choices[j], choices[i]
    else:
        choices[i] = (choices[i][0], draw.choice(options[choices[i][0]]))
    return choices
