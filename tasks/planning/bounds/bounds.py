"""Lower bounds on any plan: the pattern LP with its dual prices, and its MILP for plans without preemption.

Where order, releases or leaving nodes decide when something can run, a second LP divides time into windows.

Over its whole length, any plan gives each (job, option) some seconds, and each node uses each pattern (a way to divide
the node into slots) for some seconds. The pattern LP requires only that these seconds agree, and ignores when they
occur. The LP is small, and its bound is within a percent of the plans that are found.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ringmaster.tasks.planning.bounds.certificates import certified_bound, certified_ends_bound
from ringmaster.tasks.planning.bounds.job_costs import earliest_ends_s, shortest_of
from ringmaster.tasks.planning.bounds.windows import faults_of
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob


@dataclass(frozen=True)
class Bound:
    """A lower bound in seconds; `certificate` proves it, or otherwise `proof` names the method that does."""

    seconds: float
    certificate: Certificate | None
    proof: str


@dataclass(frozen=True)
class ValueBound:
    """A lower bound on the value of an objective; `certificate` proves the part of it that is a sum of weight x end."""

    value: float
    certificate: Certificate | None


def preemptive_bound(problem: Problem) -> Bound:
    """Returns the best bound on any plan, with its certificate: of the pattern LP, a chain of `after`, or of windows.

    The bound is infinite where nodes become unavailable before they can have done all work.
    """
    from ringmaster.tasks.planning.bounds.windows import WindowModel, has_windows, points_of

    best = pattern_bound(problem)
    if not has_windows(problem) or not 0 < best.seconds < math.inf:
        return best
    model = WindowModel(problem, points_s=points_of(problem, before_s=best.seconds), unit_s=best.seconds)
    prices = model.prices()
    if prices is None or next(faults_of(prices, problem), None):
        return best
    certificate = Certificate(windows=prices)
    seconds = certified_bound(certificate, problem)
    return Bound(seconds, certificate, "window prices") if seconds > best.seconds * (1 + 1e-6) else best


def pattern_bound(problem: Problem) -> Bound:
    """Returns the bound of the pattern LP with its certificate, or that of the longest chain of `after`."""
    from ringmaster.tasks.planning.bounds.pattern_model import PatternModel

    simple = _simple_certificate(problem)
    candidates, unit_s = [simple], certified_bound(simple, problem)
    if math.isfinite(unit_s):
        model = PatternModel(problem, unit_s=unit_s)
        if model.solve() and (certificate := model.certificate()):
            candidates.append(certificate)
    # The prices alone prove the bound, whatever status the solver reported.
    seconds, best = max(((certified_bound(c, problem), i) for i, c in enumerate(candidates)))
    chain_s = max(earliest_ends_s(problem).values())
    if chain_s > seconds:
        return Bound(chain_s, critical_path(problem), "critical path")
    return Bound(seconds, candidates[best], "dual prices")


def ends_certificate(problem: Problem, weights: Mapping[str, float], bound: Bound) -> Certificate:
    """Returns the certificate of the best lower bound on the sum of weight x end of any plan.

    bound: on the end of the last job.
    """
    from ringmaster.tasks.planning.bounds.completions import completion_certificate

    has_slots = bound.certificate is not None and bound.certificate.has_slot_prices
    candidates = [by_area(problem), bound.certificate if has_slots else pattern_bound(problem).certificate]
    if 0 < bound.seconds < math.inf and not problem.is_fused:
        candidates.append(completion_certificate(problem, weights, bound_s=bound.seconds))
    known = [each for each in candidates if each is not None and (each.has_slot_prices or each.completions)]
    return max(known, key=lambda certificate: certified_ends_bound(certificate, problem, weights))


def rigid_bound(
    problem: Problem, *, work_s: float = 5.0, time_limit_s: float = 300.0
) -> tuple[float, dict[str, int] | None]:
    """Returns a lower bound in seconds on plans without preemption, and the options that the relaxation chose.

    The options are None if the relaxation found none. The limits are those of `PatternModel.solve`.
    """
    from ringmaster.tasks.planning.bounds.pattern_model import Integral, PatternModel

    unit_s = certified_bound(_simple_certificate(problem), problem)
    if not math.isfinite(unit_s):
        return unit_s, None
    model = PatternModel(problem, unit_s=unit_s, integral=Integral.OPTIONS)
    model.solve(work_s=work_s, time_limit_s=time_limit_s)
    return max(0.0, model.bound_s()), model.chosen_options()


def plain_bound_s(problem: Problem) -> float:
    """Returns the best lower bound on any plan that arithmetic finds without prices of a plan."""
    return max(certified_bound(_simple_certificate(problem), problem), *earliest_ends_s(problem).values())


def critical_path(problem: Problem) -> Certificate | None:
    """Returns the prices of the longest chain of `after`: 1 a second for its jobs. None for fused problems."""
    if problem.is_fused:
        return None
    ends_s, jobs = earliest_ends_s(problem), {job.id: job for job in problem.jobs}
    chain = [max(ends_s, key=lambda job: ends_s[job])]
    while after := jobs[chain[0]].after:
        last = max(after, key=lambda job: ends_s[job])
        if ends_s[last] <= jobs[chain[0]].release_s:
            break
        chain.insert(0, last)
    own, order = dict.fromkeys(chain, (1.0,)), dict.fromkeys(pairwise(chain), (1.0,))
    return Certificate(windows=WindowPrices((0.0,), ({},), own, order))


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


COUNTING = "counting equal jobs"
"""Name of the proof in plans."""

MAX_UNITS = 100_000  # size limit of the table; beyond it the bound is 0


def counted_bound_s(problem: Problem) -> float:
    """Returns a lower bound in seconds on plans without preemption of equal jobs; 0 where the jobs are not equal."""
    shapes = {_shape(job) for job in problem.jobs}
    if len(shapes) != 1 or problem.is_fused or any(job.started for job in problem.jobs):
        return 0.0
    options = problem.jobs[0].options
    per_job = math.lcm(*(option.num_devices for option in options))
    needed = -(-len(problem.jobs) * per_job // problem.num_devices)
    if needed > MAX_UNITS:
        return 0.0
    runs = {per_job // option.num_devices: math.inf for option in options}
    for option in options:
        units = per_job // option.num_devices
        runs[units] = min(runs[units], option.whole_s)
    least_s = [0.0]
    for count in range(1, needed + 1):
        least_s.append(min(least_s[max(0, count - units)] + seconds for units, seconds in runs.items()))
    return least_s[needed]


def _shape(job: PlanningJob) -> frozenset[tuple[object, ...]]:
    return frozenset(_seconds_of(option) for option in job.options)


def _seconds_of(option: Option) -> tuple[object, ...]:
    return (option.num_devices, option.num_nodes, option.device_type, option.host_memory_bytes, option.whole_s)
