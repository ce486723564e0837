"""The one entry of planning: `solve(problem)` gives the best plan found, with a bound that says how good it
is."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from tasks.planning.baselines import BASELINES
from tasks.planning.bounds import preemptive_bound, rigid_bound, useful_options
from tasks.planning.listing import Choice, makespan_s, schedule
from tasks.planning.plan import Plan, Segment
from tasks.planning.problem import Problem
from tasks.planning.time_indexed import solve_time_indexed

Preemption = Literal["auto", "never", "always"]
Objective = Literal["makespan"]

MAX_JOBS_OF_MILP = 12


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    preemption: Preemption = "auto",
    objective: Objective = "makespan",
) -> Plan:
    """The best plan found for a problem, never worse than any of `baselines.BASELINES`.

    Equal arguments give equal plans: the work is bounded by counts of iterations, and `time_limit_s` is only
    the outer guard; once it is reached, the best plan so far is returned with its gap.
    preemption: "never" keeps each job in one segment; otherwise jobs may switch where that helps.
    Raises ValueError for an unknown preemption or objective.
    """
    if preemption not in ("auto", "never", "always"):
        raise ValueError(f"preemption is auto, never or always, not {preemption!r}")
    if objective != "makespan":
        raise ValueError(f"objective is makespan, not {objective!r}")
    clock = _Clock(time_limit_s)
    with clock.stage("bounds"):
        bound = preemptive_bound(problem)
        rigid_s, relaxed = rigid_bound(problem, time_limit_s=min(5.0, clock.left_s()))
    with clock.stage("heuristics"):
        plans = [baseline(problem) for baseline in BASELINES]
        if relaxed:
            longest_first = sorted(relaxed, key=lambda job: (-problem.job(job).options[relaxed[job]].runtime_s, job))
            choices = [(job, relaxed[job]) for job in longest_first]
            plans.append(Plan(problem.name, schedule(problem, choices), method="pattern MILP's options"))
        best = min(plans, key=lambda plan: plan.makespan_s)
        best = _better(best, _improve(problem, best, bound_s=bound.seconds, seed=seed, clock=clock))
    if len(problem.jobs) <= MAX_JOBS_OF_MILP and best.makespan_s > bound.seconds * (1 + 1e-4):
        with clock.stage("MILP"):
            found = solve_time_indexed(problem, horizon_s=best.makespan_s, time_limit_s=clock.left_s(), seed=seed)
            if found:
                start = Plan(problem.name, schedule(problem, found), method="time-indexed MILP")
                best = _better(best, start)
                best = _better(best, _improve(problem, start, bound_s=bound.seconds, seed=seed, clock=clock))
    if preemption == "never" and rigid_s > bound.seconds:
        return replace(best, lower_bound_s=min(rigid_s, best.makespan_s), proof="pattern MILP", seconds=clock.seconds)
    return replace(
        best,
        lower_bound_s=min(bound.seconds, best.makespan_s),
        certificate=bound.certificate,
        proof=bound.proof,
        seconds=clock.seconds,
    )


class _Clock:
    """The outer time limit, and what each stage took of it."""

    def __init__(self, limit_s: float) -> None:
        self.ends_at = time.monotonic() + limit_s
        self.seconds: dict[str, float] = {}

    def left_s(self) -> float:
        return max(0.0, self.ends_at - time.monotonic())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def _better(a: Plan, b: Plan) -> Plan:
    return b if b.makespan_s < a.makespan_s * (1 - 1e-9) else a


def _improve(problem: Problem, plan: Plan, *, bound_s: float, seed: int, clock: _Clock) -> Plan:
    """Hill climbing over (order of jobs, option of each), re-scheduling the list after each move."""
    draw = random.Random(seed)
    options = {job.id: useful_options(job) for job in problem.jobs}
    now: list[Choice] = [(segment.job, segment.option) for segment in plan.segments]
    best, best_s = plan.segments, plan.makespan_s
    for _ in range(max(50, 20_000 // len(now))):
        if best_s <= bound_s * (1 + 1e-6) or not clock.left_s():
            break
        trial = _MOVES[draw.randrange(len(_MOVES))](list(now), draw, options)
        segments: tuple[Segment, ...] = schedule(problem, trial)
        if makespan_s(segments) <= best_s:
            now, best, best_s = trial, segments, makespan_s(segments)
    return replace(plan, segments=best, method=plan.method + " + local search")


def _reinsert(choices: list[Choice], draw: random.Random, options: dict[str, tuple[int, ...]]) -> list[Choice]:
    choices.insert(draw.randrange(len(choices)), choices.pop(draw.randrange(len(choices))))
    return choices


def _swap(choices: list[Choice], draw: random.Random, options: dict[str, tuple[int, ...]]) -> list[Choice]:
    i, j = draw.randrange(len(choices)), draw.randrange(len(choices))
    choices[i], choices[j] = choices[j], choices[i]
    return choices


def _change_option(choices: list[Choice], draw: random.Random, options: dict[str, tuple[int, ...]]) -> list[Choice]:
    i = draw.randrange(len(choices))
    job = choices[i][0]
    choices[i] = (job, draw.choice(options[job]))
    return choices


_Move = Callable[[list[Choice], random.Random, dict[str, tuple[int, ...]]], list[Choice]]
_MOVES: tuple[_Move, ...] = (_reinsert, _swap, _change_option, _change_option)
