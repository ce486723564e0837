"""Lower bounds on any plan: the pattern LP with its dual prices, and its MILP for plans without preemption.

Over its whole length, any plan gives each (job, option) some seconds, and each node uses each pattern (a way to divide
the node into slots) for some seconds. The pattern LP requires only that these seconds agree, and ignores when they
occur. The LP is small, and its bound is within a percent of the plans that are found.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ringmaster.tasks.planning.bounds.certificates import certified_bound, shortest_of
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.problem import Option, PlanningJob, Problem

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Bound:
    """A lower bound in seconds; `certificate` proves it, or otherwise `proof` names the method that does."""

    seconds: float
    certificate: Certificate | None
    proof: str


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


def preemptive_bound(problem: Problem) -> Bound:
    """Returns the best bound on any plan: that of the pattern LP with its certificate, or the longest chain of `after`.

    The bound is infinite where nodes become unavailable before they can have done all work.
    """
    from ringmaster.tasks.planning.bounds.pattern_model import PatternModel

    simple = _simple_certificate(problem)
    candidates, unit_s = [simple], certified_bound(simple, problem)
    if math.isfinite(unit_s):
        model = PatternModel(problem, unit_s=unit_s)
        if model.solve() and (certificate := model.certificate()):
            candidates.append(certificate)
    # The prices alone prove the bound, whatever status the solver reported.
    seconds, best = max(((certified_bound(c, problem), i) for i, c in enumerate(candidates)))
    chain_s = critical_path_s(problem)
    if chain_s > seconds:
        return Bound(chain_s, None, "critical path")
    return Bound(seconds, candidates[best], "dual prices")


def rigid_bound(problem: Problem, *, time_limit_s: float) -> tuple[float, dict[str, int] | None]:
    """Returns a lower bound in seconds on plans without preemption, and the options that the relaxation chose.

    The options are None if the relaxation found none.
    """
    from ringmaster.tasks.planning.bounds.pattern_model import Integral, PatternModel

    unit_s = certified_bound(_simple_certificate(problem), problem)
    if not math.isfinite(unit_s):
        return unit_s, None
    model = PatternModel(problem, unit_s=unit_s, integral=Integral.OPTIONS)
    model.solve(time_limit_s=time_limit_s)
    return max(0.0, model.bound_s()), model.chosen_options()


def critical_path_s(problem: Problem) -> float:
    """Returns the length of the longest chain of jobs that wait for each other, each under its fastest option."""
    return max(earliest_ends_s(problem).values())


def earliest_ends_s(problem: Problem) -> dict[str, float]:
    """Returns when each job could end if it had all devices to itself, by job id.

    A job starts at its release or at the latest end of the jobs that it waits for, and runs under its fastest option.
    """
    ends: dict[str, float] = {}
    shortest = shortest_of(problem)
    for job in in_order(problem):
        start_s = max([job.release_s, *(ends[other] for other in job.after)])
        ends[job.id] = start_s + shortest[job.id]
    return ends


def in_order(problem: Problem) -> Iterator[PlanningJob]:
    """Yields the jobs in a topological order: each job after those that it waits for."""
    done: set[str] = set()
    left = list(problem.jobs)
    while left:
        ready = [job for job in left if all(other in done for other in job.after)]
        yield from ready
        done |= {job.id for job in ready}
        left = [job for job in left if job.id not in done]


def by_area(problem: Problem) -> Certificate:
    """Returns prices that need no solver: 1 a second for each device, 0 for a job's own time."""
    slots = {option.slot for job in problem.jobs for option in job.options}
    return Certificate({slot: float(slot) for slot in sorted(slots)})


def _simple_certificate(problem: Problem) -> Certificate:
    """Returns the better of two certificates: prices by area, or the whole price on the longest job."""
    shortest = shortest_of(problem)
    longest = max(shortest, key=lambda job: shortest[job])
    cover = {longest: 1.0} if problem.is_fused else {}
    by_length = Certificate(job_prices={longest: 1.0}, cover_prices=cover)
    return max(by_area(problem), by_length, key=lambda certificate: certified_bound(certificate, problem))
