"""Costs of jobs at given prices, what nodes earn, the options worth considering, and the order of jobs that wait."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from ringmaster.tasks.planning.plans.plan import Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob

LEAST, LARGEST = 1e-100, 1e100
"""Numbers between which sums and products of prices and seconds keep their digits."""
ROUNDING = 1e-12
"""A share of the numbers that a bound is computed from, which exceeds all errors of rounding."""


def scaling_of(prices: Iterable[float]) -> Callable[[float], float]:
    """Returns a function that multiplies a price by a power of two, which makes the largest one about 1.

    Bounds do not depend on the unit of prices. Prices so small that products of them would lose their digits become 0:
    any prices >= 0 prove a bound. Raises ValueError where a price is negative or not finite.
    """
    known = list(prices)
    if any(not math.isfinite(price) or price < 0 for price in known):
        raise ValueError("a price is negative or not finite")
    exponent = -math.frexp(max(known, default=0.0))[1]

    def scaled(price: float) -> float:
        scaled_price = math.ldexp(price, exponent)
        return scaled_price if scaled_price >= LEAST else 0.0

    return scaled


def least_of(job: PlanningJob, prices: Sequence[float], switch_cost_s: float) -> float:
    """Returns the least total worth of a job's seconds, where a second under option o is worth prices[o].

    The cost of a plan is linear in how it divides the work among its segments. So it is cheapest to do all the work in
    one segment; at most one more segment is worth its cost, a last one that evaluates:

        min( min_o price_o (head_o + runtime_o + save_o + evaluate_o),
             min_o price_o (head_o + runtime_o + save_o) + min_o price_o (switch + startup_o + save_o + evaluate_o) )

    head_o is what the job's first segment pays at its start: the start-up, and also the switch cost where the job has
    started before. It is 0 under the option that the job runs under at time 0.
    """
    rows = []
    for k, (price, o) in enumerate(zip(prices, job.options, strict=True)):
        whole_s = whole_of(job, k, switch_cost_s)
        last_s = switch_cost_s + o.startup_s + o.save_s + o.evaluate_s
        rows.append((price * whole_s, price * (whole_s - o.evaluate_s), price * last_s))
    whole, work, last = (min(column) for column in zip(*rows, strict=True))
    return float(min(whole, work + last))


def whole_of(job: PlanningJob, option: int, switch_cost_s: float) -> float:
    """Returns the seconds of a whole job in one segment under the option with that index, including its overhead."""
    chosen = job.options[option]
    if job.running is not None and option == job.running.option:
        return chosen.whole_s - chosen.startup_s
    return chosen.whole_s + (switch_cost_s if job.started else 0.0)


def shortest_of(problem: Problem) -> dict[str, float]:
    """Returns the least seconds of each job from its first start to its end, alone or in a group."""
    if not problem.is_fused:
        return {job.id: shortest_s(job, problem.switch_cost_s) for job in problem.jobs}
    shortest: dict[str, float] = {}
    for job in problem.jobs:
        for option in job.options:
            for name in (job.id, *option.jobs):
                shortest[name] = min(option.runtime_s, shortest.get(name, math.inf))
    return {job.id: shortest[job.id] for job in problem.jobs}


def shortest_s(job: PlanningJob, switch_cost_s: float) -> float:
    """Returns the least seconds of a job from its first start to its end."""
    return least_of(job, [1.0] * len(job.options), switch_cost_s)


def pack_of(prices: Mapping[int, float], problem: Problem) -> list[float]:
    """Returns the maximum worth of slots that fit g devices together, for each g."""
    pack = [0.0]
    for size in range(1, max(node.num_devices for node in problem.nodes) + 1):
        fits = (pack[size - slot] + price for slot, price in prices.items() if 0 < slot <= size)
        pack.append(max([pack[-1], *fits]))
    return pack


_Key = TypeVar("_Key")


def useful_options(job: PlanningJob) -> tuple[int, ...]:
    """Returns indices of the options for the job alone that no other option dominates.

    An option dominates another if it is at least as fast with no more devices, spread in the same way. The option that
    the job is running is always included, since continuing under it is free.
    """
    alone = [(k, option) for k, option in enumerate(job.options) if not option.jobs]
    kept = set(_unbeaten(alone))
    if job.running is not None and not job.options[job.running.option].jobs:
        kept.add(job.running.option)
    return tuple(sorted(kept))


def useful_groups(problem: Problem) -> list[tuple[int, int]]:
    """Returns the (index of a job, index of its option) of all undominated options for several jobs.

    Options are compared only with options for the same set of jobs. Options that are running are always included.
    """
    rows: dict[frozenset[str], list[tuple[tuple[int, int], Option]]] = {}
    for j, job in enumerate(problem.jobs):
        for k, option in enumerate(job.options):
            if option.jobs:
                rows.setdefault(frozenset((job.id, *option.jobs)), []).append(((j, k), option))
    running = {(j, job.running.option) for j, job in enumerate(problem.jobs) if job.running is not None}
    every = [pair for row in rows.values() for pair, _ in row]
    unbeaten = {pair for row in rows.values() for pair in _unbeaten(row)}
    return [pair for pair in every if pair in unbeaten | running]


def _unbeaten(rows: Sequence[tuple[_Key, Option]]) -> list[_Key]:
    """Returns the keys of the options that no other option dominates; of equal options, the first."""
    best: dict[tuple[object, ...], tuple[_Key, Option]] = {}
    for key, option in rows:
        shape = (option.num_nodes, option.slot, *_besides(option))
        if shape not in best or option.runtime_s < best[shape][1].runtime_s:
            best[shape] = (key, option)
    return [key for key, option in best.values() if not _is_beaten(option, [other for _, other in best.values()])]


def _besides(option: Option) -> tuple[object, ...]:
    """Returns the attributes that must be equal for two options to differ in speed alone."""
    return (option.device_type, option.startup_s, option.save_s, option.evaluate_s, option.host_memory_bytes)


def _is_beaten(option: Option, others: Sequence[Option]) -> bool:
    """Whether another option, with no larger slots and no more nodes, is at least as fast."""
    return any(
        (other.num_nodes, other.slot) != (option.num_nodes, option.slot)
        and other.num_nodes <= option.num_nodes
        and other.slot <= option.slot
        and other.runtime_s <= option.runtime_s
        and _besides(other) == _besides(option)
        for other in others
    )


def earliest_ends_s(problem: Problem) -> dict[str, float]:
    """Returns the seconds before which no plan ends each job, by job id: its earliest start and fastest option."""
    heads_s, shortest = earliest_starts_s(problem), shortest_of(problem)
    return {job: head_s + shortest[job] for job, head_s in heads_s.items()}


def earliest_starts_s(problem: Problem) -> dict[str, float]:
    """Returns the seconds before which no plan starts each job, by job id.

    A job starts after its release and after the earliest ends of the jobs that it waits for. Until then, all jobs that
    it waits for, directly or through others, have taken their least device-seconds:

        start_j  >=  sum over those jobs of least_of(job, price_o = devices_o)  /  all devices
    """
    starts: dict[str, float] = {}
    shortest, areas = shortest_of(problem), dict[str, float]()
    for job in problem.in_order:
        starts[job.id] = max([job.release_s, *(starts[other] + shortest[other] for other in job.after)])
        before = problem.ancestors[job.id]
        if len(before) > 1 and not problem.is_fused:
            for other in before - areas.keys():
                row = problem.job(other)
                areas[other] = least_of(row, [o.num_devices for o in row.options], problem.switch_cost_s)
            area = math.fsum(areas[other] for other in before) * (1 - ROUNDING)
            starts[job.id] = max(starts[job.id], area / problem.num_devices)
    return starts


def is_foldable(problem: Problem) -> bool:
    """Whether the problem would be plain but for seconds in addition to runtimes and jobs that run at time 0."""
    return (
        not problem.is_fused
        and not problem.limits
        and not any(job.after or job.release_s or job.deadline_s is not None for job in problem.jobs)
        and not any(node.available_until_s is not None or node.host_memory_bytes is not None for node in problem.nodes)
    )


def folded(problem: Problem) -> Problem:
    """Returns a problem without overheads in which every job that does not switch takes the same time."""
    if not any(o.startup_s or o.save_s or o.evaluate_s for job in problem.jobs for o in job.options):
        return problem
    again_s = median(o.startup_s + o.save_s for job in problem.jobs for o in job.options)
    jobs = tuple(
        replace(job, options=tuple(_folded(job, k, option) for k, option in enumerate(job.options)))
        for job in problem.jobs
    )
    return replace(problem, jobs=jobs, switch_cost_s=problem.switch_cost_s + again_s)


def _folded(job: PlanningJob, k: int, option: Option) -> Option:
    goes_on = job.running is not None and k == job.running.option
    whole_s = option.whole_s - (option.startup_s if goes_on else 0.0)
    return replace(option, runtime_s=whole_s, startup_s=0.0, save_s=0.0, evaluate_s=0.0)


def only(problem: Problem, names: Collection[str]) -> Problem:
    """Returns the problem restricted to some of its jobs.

    An option that trains several jobs is assigned to the first one that is left. Jobs no longer wait for those that are
    left out.
    """
    options: dict[str, list[Option]] = {job.id: [] for job in problem.jobs if job.id in names}
    for job in problem.jobs:
        for option in job.options:
            left = [name for name in (job.id, *option.jobs) if name in names]
            if left:
                options[left[0]].append(replace(option, jobs=tuple(left[1:])))
    jobs = []
    for job in problem.jobs:
        if job.id in names:
            after = tuple(other for other in job.after if other in names)
            kept = replace(job, options=tuple(options[job.id]), after=after)
            # The index of a running option is invalid once options are moved.
            jobs.append(replace(kept, running=None, started=False) if problem.is_fused else kept)
    return replace(problem, jobs=tuple(jobs))


@dataclass(frozen=True)
class NarrowedProblem:
    """A problem with some of the options; options[job] are the indices that they have in the original."""

    problem: Problem
    options: Mapping[str, tuple[int, ...]]

    def original(self, segments: Iterable[Segment]) -> list[Segment]:
        """Returns segments of a plan with the options of the original."""
        return [replace(each, option=self.options[each.job][each.option]) for each in segments]


def narrowed(problem: Problem, fits: Callable[[PlanningJob, Option], bool]) -> NarrowedProblem | None:
    """Returns the problem with the options that fit; None where a job has none left, or not the one that it runs."""
    kept, jobs = {}, []
    for job in problem.jobs:
        left = tuple(k for k, option in enumerate(job.options) if fits(job, option))
        if not left or (job.running is not None and job.running.option not in left):
            return None
        kept[job.id] = left
        running = job.running and replace(job.running, option=left.index(job.running.option))
        jobs.append(replace(job, options=tuple(job.options[k] for k in left), running=running))
    return NarrowedProblem(replace(problem, jobs=tuple(jobs)), kept)


def without_overheads(problem: Problem) -> Problem | None:
    """Returns the problem with all that a job in one segment pays added to its runtimes; options keep their indices.

    Jobs that run at time 0 continue on their devices. Returns None where more than runtimes decides when and where a
    job can run: jobs that wait, releases, deadlines, nodes with limited availability or host memory, groups.
    """
    if not is_foldable(problem):
        return None

    def bare(job: PlanningJob) -> PlanningJob:
        options = (
            Option(
                o.technique,
                o.num_devices,
                whole_of(job, k, problem.switch_cost_s),
                o.num_nodes,
                o.config,
                o.device_type,
            )
            for k, o in enumerate(job.options)
        )
        return PlanningJob(job.id, tuple(options))

    return replace(problem, jobs=tuple(map(bare, problem.jobs)))
