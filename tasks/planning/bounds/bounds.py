"""Lower bounds on any plan: the pattern LP with its dual prices, and its MILP for plans without preemption.

Over its whole length, any plan gives each (job, option) some seconds, and each node uses each pattern (a way to divide
the node into slots) for some seconds. The pattern LP requires only that these seconds agree, and ignores when they
occur. The LP is small, and its bound is within a percent of the plans that are found.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ringmaster.tasks.planning.bounds.certificates import certified_bound, shortest_of
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.parts import PlanningJob
from ringmaster.tasks.planning.problems.problem import Problem


@dataclass(frozen=True)
class Bound:
    """A lower bound in seconds; `certificate` proves it, or otherwise `proof` names the method that does."""

    seconds: float
    certificate: Certificate | None
    proof: str


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
