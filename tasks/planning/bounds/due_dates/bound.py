"""Lower bounds on the largest of factor x end over jobs: by due dates, and from bounds on the last end of some jobs.

All jobs whose factor is at least f end by value / f. So no value is below f x the bound on the last end of these jobs
alone. Any certificate of a bound on the last end proves a bound of each such set of jobs. These bounds know of
releases, order and leaving nodes; those by due date (`prices`) know that some jobs end before others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ringmaster.tasks.planning.bounds.bounds import Bound, ValueBound, by_area, preemptive_bound
from ringmaster.tasks.planning.bounds.certificates import certified_bound
from ringmaster.tasks.planning.bounds.due_dates.model import due_prices
from ringmaster.tasks.planning.bounds.due_dates.prices import due_bound, factors_of
from ringmaster.tasks.planning.bounds.order import earliest_ends_s
from ringmaster.tasks.planning.bounds.window_model import evenly, has_windows
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.restriction import only

MAX_SETS = 16  # of jobs that are bounded, evenly chosen where there are more different factors


def latest_bound(
    problem: Problem, latest: Mapping[str, float], *, bound_s: float, certificate: Certificate | None = None
) -> float:
    """Returns a value that the largest of factor x end is never below, by arithmetic alone.

    latest: the factors, by job.
    bound_s: a lower bound on the last end of all jobs.
    certificate: prices that prove more; prices by area are always tried.

    Raises ValueError where a price is invalid.
    """
    factors, ends_s = factors_of(problem, latest), earliest_ends_s(problem)
    least = max(min(factors.values()) * bound_s, *(factor * ends_s[job] for job, factor in factors.items()))
    by_due = certificate.due if certificate else None
    if by_due is not None:
        return max(least, due_bound(by_due, problem, latest))
    for factor, part in parts_of(problem, latest):
        names = {job.id for job in part.jobs}
        tried = [by_area(part), *([certificate.only(names)] if certificate else [])]
        least = max([least, *(factor * certified_bound(each, part) for each in tried)])
    return least


def best_latest_bound(problem: Problem, latest: Mapping[str, float], bound: Bound) -> ValueBound:
    """Returns the best lower bound on the largest of factor x end, with the certificate that proves most of it.

    bound: on the last end of all jobs.
    """
    tried = [bound.certificate]
    if len(set(factors_of(problem, latest).values())) > 1:
        if has_windows(problem) or problem.is_fused:
            tried += [preemptive_bound(part).certificate for _, part in parts_of(problem, latest)]
        least = latest_bound(problem, latest, bound_s=bound.seconds, certificate=bound.certificate)
        if 0 < least < math.inf and not problem.is_fused:
            by_due = due_prices(problem, latest, least=least)
            tried.append(Certificate(due=by_due) if by_due else None)
    found = [ValueBound(latest_bound(problem, latest, bound_s=bound.seconds, certificate=each), each) for each in tried]
    return max(found, key=lambda each: each.value)


def parts_of(problem: Problem, latest: Mapping[str, float]) -> Iterator[tuple[float, Problem]]:
    """Yields factors, each with the jobs whose factor is at least that, if there are several different ones."""
    factors = factors_of(problem, latest)
    different = sorted({factor for factor in factors.values() if factor > 0}, reverse=True)
    if len(set(factors.values())) > 1:
        for factor in evenly(different, MAX_SETS):
            yield factor, only(problem, {job for job, own in factors.items() if own >= factor})
