"""The order of events of a plan, by local search over linear programs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ringmaster.tasks.planning.bounds.completion_model import likely_ends_s
from ringmaster.tasks.planning.bounds.job_costs import shortest_of
from ringmaster.tasks.planning.bounds.order import earliest_ends_s, in_order
from ringmaster.tasks.planning.objectives.objective import Coefficients
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.with_rules.event_lp import Event, EventLp, Kind, Periods, has_due_dates
from ringmaster.tasks.planning.work import WorkBudget

MAX_LPS, SIZE_OF_LPS = 24, 12_000  # linear programs of one search for the order, and their limit in jobs x periods
PER_SIZE_S = 2e-4  # work of a linear program, per job and period


@dataclass(frozen=True)
class OrderFound:
    """An order of events, and the periods between them in its linear program."""

    order: list[Event]
    periods: Periods
    lp: EventLp


def best_order(
    orders: Sequence[list[Event]], problem: Problem, of: Coefficients, bound_s: float, work: WorkBudget
) -> OrderFound | None:
    """Returns the best order of events that swaps of neighbours find from the best of the given ones."""

    def solved(order: list[Event]) -> OrderFound | None:
        work.charge(PER_SIZE_S * (len(order) + 1) * len(problem.jobs))
        lp = EventLp(problem, order, of, unit_s=bound_s)
        periods = lp.solved()
        return None if periods is None else OrderFound(order, periods, lp)

    firsts = [found for order in orders if (found := solved(order))]
    if not firsts:
        return None
    best, num_lps, i, unchanged = min(firsts, key=lambda found: found.periods.value), 0, 0, 0
    after = {job.id: set(job.after) for job in problem.jobs}
    most = min(MAX_LPS, SIZE_OF_LPS // ((len(best.order) + 1) * len(problem.jobs)))
    while num_lps < most and unchanged < len(best.order) - 1 and not work.is_over():
        i = i % (len(best.order) - 1)
        a, b = best.order[i], best.order[i + 1]
        i, unchanged = i + 1, unchanged + 1
        if not _may_swap(a, b, after):
            continue
        order = list(best.order)
        order[i - 1], order[i] = b, a
        num_lps += 1
        found = solved(order)
        if found is not None and found.periods.value < best.periods.value * (1 - 1e-6):
            best, unchanged = found, 0
    return best


def _may_swap(a: Event, b: Event, after: Mapping[str, set[str]]) -> bool:
    """Whether two neighbours may change places: not two that happen at fixed times, nor a job and one it waits for."""
    if a.at_s is not None and b.at_s is not None:
        return False
    return not (a.kind is Kind.END and b.kind is Kind.END and any(after[name] & a.names for name in b.names))


def first_orders(
    problem: Problem, ends_s: Mapping[str, float], of: Coefficients, bound_s: float
) -> Iterator[list[Event]]:
    """Yields orders of events: ends of jobs in the middle of where they can be, and as given."""
    fixed: dict[tuple[Kind, float], set[str]] = {}
    for job in problem.jobs:
        if job.release_s > 0:
            fixed.setdefault((Kind.RELEASE, job.release_s), set()).add(job.id)
        if job.deadline_s is not None:
            fixed.setdefault((Kind.DUE, job.deadline_s), set()).add(job.id)
    for node in problem.nodes:
        if node.available_until_s is not None:
            fixed.setdefault((Kind.LEAVE, node.available_until_s), set()).add(node.id)
    rows = [(at_s, Event(kind, frozenset(names), at_s)) for (kind, at_s), names in fixed.items()]
    waited_for = {other for job in problem.jobs for other in job.after}
    ends = [job.id for job in problem.jobs if job.id in waited_for or of.ends.get(job.id, 0.0) > 0]
    middles = _middles(problem, bound_s)
    likely_s = likely_ends_s(problem, of.ends, bound_s=bound_s) if of.ends else {}
    together = _of_one_factor(of, others=ends) if has_due_dates(of) else []
    smallest = min(of.latest.values(), default=0.0)
    due_s = {job: bound_s * smallest / of.latest[job] for jobs in together for job in jobs}
    for guess in (middles | due_s | likely_s, ends_s):
        own = [(guess[job], Event(Kind.END, frozenset({job}))) for job in ends]
        own += [(max(guess[job] for job in jobs), Event(Kind.END, jobs)) for jobs in together]
        ordered = sorted([*rows, *own], key=lambda row: (row[0], row[1].kind, sorted(row[1].names)))
        order = _in_precedence([event for _, event in ordered], problem)
        yield order


def _of_one_factor(of: Coefficients, *, others: Collection[str]) -> list[frozenset[str]]:
    """Returns the jobs with the same factor in the maximum, which may all end together, without some other jobs."""
    jobs: dict[float, set[str]] = {}
    for job, factor in of.latest.items():
        if job not in others:
            jobs.setdefault(factor, set()).add(job)
    return [frozenset(names) for names in jobs.values()]


def _middles(problem: Problem, bound_s: float) -> dict[str, float]:
    """Returns the middle between the earliest end of each job, and the latest if all jobs end by the bound."""
    earliest, shortest = earliest_ends_s(problem), shortest_of(problem)
    latest = {job.id: bound_s for job in problem.jobs}
    for job in reversed(list(in_order(problem))):
        for other in job.after:
            latest[other] = min(latest[other], latest[job.id] - shortest[job.id])
    return {job: (earliest[job] + latest[job]) / 2 for job in earliest}


def _in_precedence(order: list[Event], problem: Problem) -> list[Event]:
    """Returns the order with ends of jobs moved behind the ends of those that they wait for."""
    after = {job.id: set(job.after) for job in problem.jobs}
    left, done, found = list(order), set[str](), []
    while left:
        ready = (e for e in left if e.kind is not Kind.END or all(after[name] <= done for name in e.names))
        event = next(ready)
        left.remove(event)
        found.append(event)
        done |= event.names if event.kind is Kind.END else frozenset()
    return found


def earlier(order: Sequence[Event], share: float) -> list[Event]:
    """Returns the order with nodes that leave, and deadlines, at a share of their time."""
    return [
        replace(event, at_s=event.at_s * share) if event.kind is not Kind.RELEASE and event.at_s is not None else event
        for event in order
    ]
