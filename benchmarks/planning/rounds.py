"""Schedulers of the literature that reassign devices in rounds, as simple rules on planning problems.

They are written from the ideas of the papers, not from their code, and are called "-style" for what they leave out:

- Sia-style (Jayaram Subramanya et al., SOSP 2023): each round minimises the sum over jobs of (r G)^p, where G is the
  speed of the chosen option over that of the job's slowest one, p = -0.5, r < 1 discounts options that restart the job,
  and jobs that wait count 1.1. Left out: profiling while jobs run, adaptive batch sizes. Speeds are known exactly.
- Shockwave-style (Zheng et al., NSDI 2023): each round maximises the sum over jobs of rho^5 x the gain of
  log(progress). This is the Nash social welfare of the progress, weighted by the predicted finish-time fairness rho of
  the job's group. Left out: the program over many rounds (each round is chosen for itself), the term of the makespan,
  and jobs whose speed changes. Added: a job may run under any of its options, where Shockwave fixes its devices.

In both, the choice of a round is optimal: a dynamic program over jobs and devices. In favour of the rules, a round
also ends when a job ends, unless a gang is just restarting. The switch cost is paid as in plans.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ringmaster.tasks.planning import Plan, Problem, Segment
from ringmaster.tasks.planning.problems.problem import user_key

ROUND_S = 360.0
SIA_POWER, SIA_WAITS = -0.5, 1.1
FAIR_POWER, MIN_PROGRESS = 5, 1e-3

Gang = tuple[str, tuple[int, ...]]  # node, devices
Choice = Mapping[str, int]  # by job, the index of its option


@dataclass
class State:
    """What the rules see at the beginning of a round.

    left: by job, the share of its work that is left; jobs that have ended are gone.
    running: by job, the option and devices of the round before.
    num_restarts: by job, how often it has switched. begun: jobs that have run.
    """

    problem: Problem
    now_s: float = 0.0
    left: dict[str, float] = field(default_factory=dict)
    running: dict[str, tuple[int, Gang]] = field(default_factory=dict)
    num_restarts: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)


Rule = Callable[[State], Choice]


def sia_style(state: State) -> Choice:
    """Returns the options of the next round with the best sum of normalised speeds."""
    switch_s, gains = state.problem.switch_cost_s, {}
    for job in state.left:
        options = state.problem.job(job).options
        slowest_s = max(option.runtime_s for option in options)
        restarted = (state.now_s - state.num_restarts.get(job, 0) * switch_s) / (state.now_s + switch_s)
        for k, option in enumerate(options):
            is_free = job not in state.begun or state.running.get(job, (-1,))[0] == k
            speed = slowest_s / option.runtime_s * (1.0 if is_free else max(1e-3, restarted))
            gains[job, k] = SIA_WAITS - speed**SIA_POWER
    return best_choice(state, gains)


def shockwave_style(state: State) -> Choice:
    """Returns the options of the next round with the best weighted gain of the logarithms of progress."""
    problem, gains = state.problem, {}
    area_s = {job.id: min(o.runtime_s * o.num_devices for o in job.options) for job in problem.jobs}
    totals, lefts = dict.fromkeys(map(user_key, problem.jobs), 0.0), dict.fromkeys(map(user_key, problem.jobs), 0.0)
    for job in problem.jobs:
        totals[user_key(job)] += area_s[job.id]
        lefts[user_key(job)] += state.left.get(job.id, 0.0) * area_s[job.id]
    for name, left in state.left.items():
        job, fair_s = problem.job(name), problem.fair_s[name]
        rho = (state.now_s + fair_s * lefts[user_key(job)] / totals[user_key(job)]) / fair_s
        done = max(MIN_PROGRESS, 1.0 - left)
        for k, option in enumerate(job.options):
            is_free = name not in state.begun or state.running.get(name, (-1,))[0] == k
            more = (ROUND_S - (0.0 if is_free else problem.switch_cost_s)) / option.runtime_s
            gains[name, k] = rho**FAIR_POWER * math.log1p(more / done)
    return best_choice(state, gains)


RULES: Mapping[str, Rule] = {"Sia-style": sia_style, "Shockwave-style": shockwave_style}


def best_choice(state: State, gains: Mapping[tuple[str, int], float]) -> Choice:
    """Returns the options with the best sum of gains that fit the devices, by a dynamic program."""
    num = state.problem.num_devices
    best: list[tuple[float, tuple[tuple[str, int], ...]]] = [(0.0, ())] * (num + 1)
    for job in state.left:
        sizes = [option.num_devices for option in state.problem.job(job).options]
        after = list(best)
        for free in range(num + 1):
            for k, size in enumerate(sizes):
                if size <= free and best[free - size][0] + gains[job, k] > after[free][0]:
                    after[free] = (best[free - size][0] + gains[job, k], (*best[free - size][1], (job, k)))
        best = after
    return dict(best[num][1])


def played(problem: Problem, rule: Rule, *, name: str) -> Plan:
    """Returns the plan that follows from a rule round by round.

    Gangs must be powers of two on one node, and nodes must have a power of two of devices, so that every choice fits.
    """
    state, segments = State(problem, left={job.id: 1.0 for job in problem.jobs}), list[Segment]()
    while state.left:
        placed = _placed(state, rule(state))
        paid = {job: _paid_s(state, job, *where) for job, where in placed.items()}
        runtimes = {job: problem.job(job).options[k].runtime_s for job, (k, _) in placed.items()}
        first_end_s = min(paid[job] + state.left[job] * runtimes[job] for job in placed)
        length_s = max([min(ROUND_S, first_end_s), *paid.values()])  # a restart that has begun is not broken off
        for job, (k, gang) in placed.items():
            share = min(state.left[job], max(0.0, length_s - paid[job]) / runtimes[job])
            end_s = state.now_s + paid[job] + share * runtimes[job]
            segments.append(Segment(job, k, state.now_s, end_s, share, paid[job], (gang,)))
            state.left[job] -= share
            state.num_restarts[job] = state.num_restarts.get(job, 0) + (paid[job] > 0)
            if state.left[job] <= 1e-12:
                del state.left[job]
        state.begun |= placed.keys()
        state.running = {job: where for job, where in placed.items() if job in state.left}
        state.now_s += length_s
    return Plan(problem.name, tuple(segments), method=name)


def _paid_s(state: State, job: str, option: int, gang: Gang) -> float:
    stays = state.running.get(job) == (option, gang)
    return 0.0 if stays or job not in state.begun else state.problem.switch_cost_s


def _placed(state: State, choice: Choice) -> dict[str, tuple[int, Gang]]:
    """Returns the devices of each job; gangs that run stay where they are, unless that leaves no place for others."""
    stays = {job: row for job, row in state.running.items() if choice.get(job) == row[0]}
    found = _fitted(state.problem, choice, stays)
    return found if found is not None else _fitted(state.problem, choice, {}) or {}


def _fitted(
    problem: Problem, choice: Choice, stays: Mapping[str, tuple[int, Gang]]
) -> dict[str, tuple[int, Gang]] | None:
    free = {node.id: set(range(node.num_devices)) for node in problem.nodes}
    for _, (node, ids) in stays.values():
        free[node] -= set(ids)
    found = dict(stays)
    for job, k in sorted(choice.items(), key=lambda row: -problem.job(row[0]).options[row[1]].num_devices):
        if job not in stays:
            size = problem.job(job).options[k].num_devices
            fits = [node for node, ids in free.items() if len(ids) >= size]
            if not fits:
                return None
            node = min(fits, key=lambda node: len(free[node]))
            ids = tuple(sorted(free[node])[:size])
            free[node] -= set(ids)
            found[job] = (k, (node, ids))
    return found
