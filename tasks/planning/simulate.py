"""What a plan is worth when predictions are wrong: a discrete-event simulation of dispatch, errors and re-planning.

Dispatch is the executor's: a segment starts when its devices are free and its predecessors are done, not when the clock
says. Each job's true runtime is its predicted one times a factor that nobody knows before the job has run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from tasks.planning.plan import Plan, Segment
from tasks.planning.problem import Problem
from tasks.planning.solve import solve

DAY_S = 86_400.0
WORTH_A_SWITCH = 0.01  # a new plan is taken up only where it ends earlier by this share of what is left


@dataclass(frozen=True)
class Simulated:
    """What happened: when the last job ended, how often jobs switched, plans were made and segments failed."""

    makespan_s: float
    num_switches: int
    num_plans: int
    num_failures: int


@dataclass(frozen=True)
class _World:
    """What is true: each job's factor on its predicted runtimes, and how often devices fail."""

    factor: Mapping[str, float]
    failures_per_day: float
    random: Random


def simulate(
    problem: Problem,
    plan: Plan,
    *,
    noise: float = 0.1,
    failures_per_day: float = 0.0,
    seed: int = 0,
    replan_every: float | None = None,
) -> Simulated:
    """Runs a plan where each job's true runtime is off by N(0, noise) of itself, and devices fail at random.

    failures_per_day: of one device; a failed gang loses the work since its last checkpoint and pays a switch.
    replan_every: a share of the plan's makespan, such as 0.1, after which what is left is planned anew with the speeds
    seen so far; None never plans again.
    """
    random = Random(seed)
    factor = {job.id: max(0.1, 1.0 + random.gauss(0.0, noise)) for job in problem.jobs}
    world = _World(factor, failures_per_day, random)
    if replan_every is None:
        state = _State()
        _advance(problem, plan.segments, world, state, until_s=float("inf"))
        return Simulated(state.now_s, state.num_switches, 1, state.num_failures)
    return _with_replanning(problem, plan, world, replan_every * plan.makespan_s, seed)


def clairvoyant(problem: Problem, *, noise: float, seed: int) -> Plan:
    """The plan of someone who knows the true runtimes that `simulate` draws with the same noise and seed."""
    random = Random(seed)
    factor = {job.id: max(0.1, 1.0 + random.gauss(0.0, noise)) for job in problem.jobs}
    return solve(_scaled(problem, factor, {}, set()), seed=seed)


class _State:
    """How far every job is, and where it ran last."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.last: dict[str, tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]] = {}
        self.num_switches = 0
        self.num_failures = 0


def _advance(
    problem: Problem, segments: tuple[Segment, ...], world: _World, state: _State, *, until_s: float
) -> list[Segment]:
    """Dispatches segments from `state.now_s` to `until_s`; returns what of them is left, with its work."""
    began_s = state.now_s
    free_s: dict[tuple[str, int], float] = {}
    ready_s: dict[str, float] = {}
    left: list[Segment] = []
    blocked: set[tuple[str, int]] = set()
    waits = {job.id: job.after for job in problem.jobs}
    remaining = {job: sum(s.work for s in segments if s.job == job) for job in {segment.job for segment in segments}}
    behind = dict(remaining)
    for segment in sorted(segments, key=lambda s: (s.start_s, s.job)):
        devices = [(node, device) for node, ids in segment.devices for device in ids]
        behind[segment.job] -= segment.work
        held = any(device in blocked for device in devices) or any(s.job == segment.job for s in left)
        unready = any(state.done.get(other, 0.0) < 1 - 1e-6 for other in waits[segment.job])
        start_s = max(
            began_s,
            ready_s.get(segment.job, 0.0),
            *(free_s.get(device, 0.0) for device in devices),
            *(state.ended_s.get(other, 0.0) for other in waits[segment.job]),
        )
        if held or unready or start_s >= until_s:
            left.append(segment)
            blocked |= set(devices)
            continue
        option = problem.job(segment.job).options[segment.option]
        gang = (segment.option, tuple(sorted(segment.devices)))
        before = state.last.get(segment.job)
        goes_on = before == gang and ready_s.get(segment.job, began_s) >= start_s - 1e-6
        overhead_s = 0.0 if before is None or goes_on else problem.switch_cost_s
        state.num_switches += int(overhead_s > 0 or (before is not None and not goes_on))
        true_s = option.runtime_s * world.factor[segment.job]
        lost_s, failures = _failures(world, len(devices), segment.work * true_s, problem.switch_cost_s)
        state.num_failures += failures
        end_s = start_s + overhead_s + segment.work * true_s + lost_s
        work = segment.work
        if end_s > until_s:
            work = max(0.0, until_s - start_s - overhead_s - lost_s) / true_s
            left.append(replace(segment, work=segment.work - work))
            blocked |= set(devices)
            end_s = until_s
        state.done[segment.job] = state.done.get(segment.job, 0.0) + work
        state.last[segment.job] = gang
        if state.done[segment.job] >= 1 - 1e-6:
            state.ended_s[segment.job] = end_s
        ready_s[segment.job] = end_s
        free_s.update(dict.fromkeys(devices, end_s))
    state.now_s = until_s if left else max(free_s.values(), default=began_s)
    return left


def _failures(world: _World, num_devices: int, seconds: float, switch_cost_s: float) -> tuple[float, int]:
    """Seconds lost to failures of a gang, and their number: each loses half a checkpoint interval and a switch."""
    if world.failures_per_day <= 0:
        return 0.0, 0
    per_s = world.failures_per_day * num_devices / DAY_S
    number, at_s = 0, world.random.expovariate(per_s)
    while at_s < seconds:
        number += 1
        at_s += world.random.expovariate(per_s)
    # Young's interval, which balances the cost of a checkpoint against what a failure loses.
    interval_s = (2 * max(1.0, switch_cost_s) / per_s) ** 0.5
    return number * (min(interval_s, seconds) / 2 + switch_cost_s), number


def _with_replanning(problem: Problem, plan: Plan, world: _World, every_s: float, seed: int) -> Simulated:
    state, segments, num_plans = _State(), plan.segments, 1
    while True:
        left = _advance(problem, segments, world, state, until_s=state.now_s + every_s)
        if not left:
            return Simulated(state.now_s, state.num_switches, num_plans, state.num_failures)
        segments = tuple(left)
        seen = {job: factor for job, factor in world.factor.items() if job in state.last}
        todo = {segment.job for segment in segments}
        rest = _scaled(problem, seen, state.done, todo)
        stay_s = _predicted(problem, segments, seen, state)
        fresh = solve(rest, seed=seed)
        num_plans += 1
        moving = [job for job in todo & set(state.last) if not _stays(fresh.segments_of(job)[0], state.last[job])]
        paid_s = problem.switch_cost_s * len(moving) / len(todo)
        if fresh.makespan_s + paid_s < stay_s * (1 - WORTH_A_SWITCH):
            shares = {job: 1.0 - state.done.get(job, 0.0) for job in todo}
            segments = tuple(replace(s, work=s.work * shares[s.job]) for s in fresh.segments)


def _stays(segment: Segment, last: tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]) -> bool:
    return (segment.option, tuple(sorted(segment.devices))) == last


def _predicted(problem: Problem, segments: tuple[Segment, ...], seen: Mapping[str, float], state: _State) -> float:
    """Seconds until the segments would end if jobs ran at the speeds that were seen."""
    factor = {job.id: seen.get(job.id, 1.0) for job in problem.jobs}
    trial = _State()
    trial.done, trial.last = dict(state.done), dict(state.last)
    trial.ended_s = dict.fromkeys(state.ended_s, 0.0)
    _advance(problem, segments, _World(factor, 0.0, Random(0)), trial, until_s=float("inf"))
    return trial.now_s


def _scaled(problem: Problem, factor: Mapping[str, float], done: Mapping[str, float], todo: set[str]) -> Problem:
    """What is left of a problem, at the speeds that are known."""
    jobs = []
    for job in problem.jobs:
        if todo and job.id not in todo:
            continue
        scale = factor.get(job.id, 1.0) * max(1e-6, 1.0 - done.get(job.id, 0.0))
        options = tuple(replace(option, runtime_s=option.runtime_s * scale) for option in job.options)
        after = tuple(other for other in job.after if not todo or other in todo)
        jobs.append(replace(job, options=options, after=after))
    return replace(problem, jobs=tuple(jobs))
