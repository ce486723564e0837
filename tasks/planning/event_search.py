"""Preemptive plans by the order of events, for jobs that wait, arrive later or are due, and for nodes that go away.

1. Events are releases, last seconds of nodes and deadlines, and the ends of jobs that others wait for; where every end
   counts, the ends of all jobs. A linear program (`EventLp`) finds the periods between events for one order. A local
   search swaps neighbours.
2. Each period is a plain problem, which the preemptive planner plans: every job with the share of its work that it does
   in the period. Jobs that run at the end of one period continue in the next where that is good.
3. The plans of all periods, one after another, become one plan. Retiming makes its times exact.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import mul

from ringmaster.tasks.planning.bounds import job_costs
from ringmaster.tasks.planning.bounds.bounds import pattern_bound
from ringmaster.tasks.planning.bounds.completions import likely_ends_s
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.objectives import Coefficients, Objective, ends_of, lateness_s
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.plans.retiming import exactly
from ringmaster.tasks.planning.preemptive import plan_preemptive
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun, Option, PlanningJob, PlanningNode
from ringmaster.tasks.planning.work import WorkBudget


class EventKind(StrEnum):
    """What happens at an event."""

    RELEASE = "release"
    LEAVE = "leave"
    DUE = "due"
    END = "end"


@dataclass(frozen=True)
class ScheduleEvent:
    """Something that happens to `names`: jobs that are released, due or end, or nodes that leave.

    at_s: when, exactly; for ends of jobs None.
    """

    kind: EventKind
    names: frozenset[str]
    at_s: float | None = None


@dataclass(frozen=True)
class Periods:
    """A solution of a program.

    lengths_s: the length of each period.
    shares: for each period, the share of each job that runs in it, by job id.
    value: of the objective.
    """

    lp: "EventLp"
    lengths_s: tuple[float, ...]
    shares: tuple[dict[str, float], ...]
    value: float


def has_due_dates(of: Coefficients, problem: Problem) -> bool:
    """Whether the ends of jobs have different factors in the maximum: each value of it is a due date for each job."""
    return bool(of.latest) and len({of.latest.get(job.id, 0.0) for job in problem.jobs}) > 1


class EventLp:
    """Minimises the objective over L[p], the length of period p, and x[j,o,p], the seconds of (j, o) in it:

        work    sum_{o,p} x[j,o,p] / whole[o]  >= 1
        time    sum_o x[j,o,p]                 <= L[p]
        slots   as in the pattern LP, for each period and the nodes that are there in it
        events  sum_{q <= p} L[q]  >= the release, or <= the last second of the nodes or deadlines, that ends period p

    x[j,o,p] exists for periods after the release of j and the ends of all jobs that it waits for, and until its own.
    """

    def __init__(self, problem: Problem, order: Sequence[ScheduleEvent], of: Coefficients, *, unit_s: float) -> None:
        self.problem, self.order, self.unit_s = problem, order, unit_s
        self.num = len(order) + 1
        self.lp = LinearProgram()
        self.at = {(event.kind, name): p for p, event in enumerate(order) for name in event.names}
        self.scale = of.per_second or 1.0
        self.lengths = [self.lp.column(cost=self._cost(p, of)) for p in range(self.num)]
        self.seconds: list[tuple[int, str, int, float]] = []  # (column, job, period, whole)
        for job in problem.jobs:
            self._add_job(job)
        self._add_nodes()
        self._add_events()
        self._add_latest(of)

    def solved(self) -> Periods | None:
        """Returns an optimum; None where the order of events is impossible."""
        if not (values := self.lp.values()):
            return None
        shares: list[dict[str, float]] = [{} for _ in range(self.num)]
        for column, job, p, whole in self.seconds:
            if values[column] > 1e-9:
                shares[p][job] = shares[p].get(job, 0.0) + values[column] / whole
        value = math.fsum(map(mul, self.lp.costs, values)) * self.unit_s * self.scale
        lengths = tuple(max(0.0, values[column]) * self.unit_s for column in self.lengths)
        return Periods(self, lengths, tuple(shares), value)

    def nodes_in(self, p: int) -> list[PlanningNode]:
        """Returns the nodes that are there in a period."""
        return [node for node in self.problem.nodes if p <= self.at.get((EventKind.LEAVE, node.id), self.num)]

    def _cost(self, p: int, of: Coefficients) -> float:
        """Returns what a second of period p adds to the value, apart from different factors of ends in the maximum."""
        ends = (weight for job, weight in of.ends.items() if p <= self.at.get((EventKind.END, job), self.num))
        return ((0.0 if has_due_dates(of, self.problem) else of.largest) + math.fsum(ends)) / self.scale

    def _periods_of(self, job: PlanningJob) -> range:
        first = self.at.get((EventKind.RELEASE, job.id), -1) + 1
        first = max([first, *(self.at[EventKind.END, other] + 1 for other in job.after)])
        last = min(self.at.get((kind, job.id), self.num - 1) for kind in (EventKind.END, EventKind.DUE))
        return range(first, last + 1)

    def _add_job(self, job: PlanningJob) -> None:
        work = self.lp.row(1.0, math.inf)
        options = [
            (job.options[k], job_costs.whole_of(job, k, self.problem.switch_cost_s))
            for k in job_costs.useful_options(job)
        ]
        for p in self._periods_of(job):
            time = self.lp.row(-math.inf, 0.0, [(self.lengths[p], -1.0)])
            for option, whole_s in options:
                whole = whole_s / self.unit_s
                for kind in self.problem.types_of(option):
                    slot = self.lp.slot_row(p, kind, option.slot)
                    entries = [(work, 1.0 / whole), (time, 1.0), (slot, float(option.num_nodes))]
                    self.seconds.append((self.lp.column(entries), job.id, p, whole))

    def _add_nodes(self) -> None:
        for p in range(self.num):
            groups = Counter((node.device_type, node.num_devices) for node in self.nodes_in(p))
            for (kind, size), count in groups.items():
                first = self.lp.row(0.0, 0.0, [(self.lengths[p], -float(count))])
                self.lp.add_walks([first, *(self.lp.row(0.0, 0.0) for _ in range(size - 1))], p, kind)

    def _add_latest(self, of: Coefficients) -> None:
        """Adds the maximum of factor x end as a column, and a row for each period in which jobs of a factor end."""
        if not has_due_dates(of, self.problem):
            return
        factors: dict[int, float] = {}
        for job, factor in of.latest.items():
            p = self.at.get((EventKind.END, job), self.num - 1)
            factors[p] = max(factor, factors.get(p, 0.0))
        value = self.lp.column(cost=of.largest / self.scale)
        for p, factor in factors.items():
            lengths = [(length, -factor / of.largest) for length in self.lengths[: p + 1]]
            self.lp.row(0.0, math.inf, [(value, 1.0), *lengths])

    def _add_events(self) -> None:
        for p, event in enumerate(self.order):
            if event.at_s is None:
                continue
            at = event.at_s / self.unit_s
            limits = (at, math.inf) if event.kind is EventKind.RELEASE else (-math.inf, at)
            self.lp.row(*limits, [(length, 1.0) for length in self.lengths[: p + 1]])


MAX_LPS, SIZE_OF_LPS = 24, 12_000  # linear programs of one search for the order, and their limit in jobs x periods
PER_SIZE_S = 2e-4  # work of a linear program, per job and period


def best_order(
    orders: Sequence[list[ScheduleEvent]], problem: Problem, of: Coefficients, bound_s: float, work: WorkBudget
) -> Periods | None:
    """Returns the periods of the best order of events that swaps of neighbours find from the best of the given ones."""

    def solved(order: list[ScheduleEvent]) -> Periods | None:
        work.charge(PER_SIZE_S * (len(order) + 1) * len(problem.jobs))
        return EventLp(problem, order, of, unit_s=bound_s).solved()

    firsts = [solution for order in orders if (solution := solved(order))]
    if not firsts:
        return None
    best, num_lps, i, unchanged = min(firsts, key=lambda periods: periods.value), 0, 0, 0
    after = {job.id: set(job.after) for job in problem.jobs}
    most, num_swaps = min(MAX_LPS, SIZE_OF_LPS // (best.lp.num * len(problem.jobs))), best.lp.num - 2
    while num_lps < most and unchanged < num_swaps and not work.is_over():
        i = i % num_swaps
        a, b = best.lp.order[i], best.lp.order[i + 1]
        i, unchanged = i + 1, unchanged + 1
        if not _may_swap(a, b, after):
            continue
        order = list(best.lp.order)
        order[i - 1], order[i] = b, a
        num_lps += 1
        solution = solved(order)
        if solution is not None and solution.value < best.value * (1 - 1e-6):
            best, unchanged = solution, 0
    return best


def _may_swap(a: ScheduleEvent, b: ScheduleEvent, after: Mapping[str, set[str]]) -> bool:
    """Whether two neighbours may change places: not two that happen at fixed times, nor a job and one it waits for."""
    if a.at_s is not None and b.at_s is not None:
        return False
    return not (a.kind is EventKind.END and b.kind is EventKind.END and any(after[name] & a.names for name in b.names))


def first_orders(
    problem: Problem, ends_s: Mapping[str, float], of: Coefficients, bound_s: float
) -> Iterator[list[ScheduleEvent]]:
    """Yields orders of events: ends of jobs in the middle of where they can be, and as given."""
    fixed: dict[tuple[EventKind, float], set[str]] = {}
    for job in problem.jobs:
        if job.release_s > 0:
            fixed.setdefault((EventKind.RELEASE, job.release_s), set()).add(job.id)
        if job.deadline_s is not None:
            fixed.setdefault((EventKind.DUE, job.deadline_s), set()).add(job.id)
    for node in problem.nodes:
        if node.available_until_s is not None:
            fixed.setdefault((EventKind.LEAVE, node.available_until_s), set()).add(node.id)
    rows = [(at_s, ScheduleEvent(kind, frozenset(names), at_s)) for (kind, at_s), names in fixed.items()]
    waited_for = {other for job in problem.jobs for other in job.after}
    ends = [job.id for job in problem.jobs if job.id in waited_for or of.ends.get(job.id, 0.0) > 0]
    middles = _middles(problem, bound_s)
    likely_s = likely_ends_s(problem, of.ends, bound_s=bound_s) if of.ends else {}
    same_factor = _of_one_factor(of, others=ends) if has_due_dates(of, problem) else []
    smallest = min(of.latest.values(), default=0.0)
    due_s = {job: bound_s * smallest / of.latest[job] for jobs in same_factor for job in jobs}
    for guess in (middles | due_s | likely_s, ends_s):
        own = [(guess[job], ScheduleEvent(EventKind.END, frozenset({job}))) for job in ends]
        own += [(max(guess[job] for job in jobs), ScheduleEvent(EventKind.END, jobs)) for jobs in same_factor]
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
    earliest, shortest = job_costs.earliest_ends_s(problem), job_costs.shortest_of(problem)
    latest = {job.id: bound_s for job in problem.jobs}
    for job in reversed(problem.in_order):
        for other in job.after:
            latest[other] = min(latest[other], latest[job.id] - shortest[job.id])
    return {job: (earliest[job] + latest[job]) / 2 for job in earliest}


def _in_precedence(order: list[ScheduleEvent], problem: Problem) -> list[ScheduleEvent]:
    """Returns the order with ends of jobs moved behind the ends of those that they wait for."""
    after = {job.id: set(job.after) for job in problem.jobs}
    left, done, ordered = list(order), set[str](), []
    while left:
        ready = (e for e in left if e.kind is not EventKind.END or all(after[name] <= done for name in e.names))
        event = next(ready)
        left.remove(event)
        ordered.append(event)
        done |= event.names if event.kind is EventKind.END else frozenset()
    return ordered


def earlier(order: Sequence[ScheduleEvent], share: float) -> list[ScheduleEvent]:
    """Returns the order with nodes that leave, and deadlines, at a share of their time."""
    return [
        replace(event, at_s=event.at_s * share)
        if event.kind is not EventKind.RELEASE and event.at_s is not None
        else event
        for event in order
    ]


MAX_SIZE = 1_500  # limit of jobs x periods, above which planning the periods takes too long
EARLIER = (1.0, 0.97, 0.93, 0.88)  # nodes leave and deadlines pass at these shares of their time, until a plan fits
MAX_PLANS, MAX_JOBS_OF_PLANS = 5, 60  # plans of the periods of one order, and their limit in jobs
MAX_FAILED = 2  # trials in a row that are no better than the best, after which no more are made
CLOSE = 1.02  # trials end where the value is not above its bound by more
PER_RETIMED_S = 0.02  # work of a plan's exact times, per job
MIN_SHARE = 1e-6  # of a job, in a period
SAME = 1e-6  # share of the makespan below which lateness is rounding


def plan_by_events(
    problem: Problem,
    start: Plan,
    *,
    bound_s: float,
    least_value: float,
    objective: Objective,
    least_s: float,
    seed: int,
    work: WorkBudget,
) -> Plan | None:
    """Returns the best plan by the order of events that a few trials find; None where there is none.

    Limits of groups, and prices, are not modelled.

    start: a plan, whose ends of jobs are one of the first orders.
    least_value: a lower bound on the objective; trials end close to it.
    least_s: minimum length of a segment of a job that has several.
    work: limits the search.
    """
    of = objective.coefficients(problem)
    safe = within_fair_memory(problem)
    if safe is None:
        return None
    orders = list(first_orders(safe.problem, ends_of(start, problem), of, bound_s))
    if (len(orders[0]) + 1) * len(problem.jobs) > MAX_SIZE:
        return None

    def planned(order: Periods, trial: int) -> Plan | None:
        segments = _planned(order, safe.problem, least_s=least_s, seed=MAX_PLANS * seed + trial, work=work)
        work.charge(PER_RETIMED_S * len(problem.jobs))
        exact = exactly(problem, safe.original(segments), objective=objective, least_s=least_s)
        return replace(start, segments=exact, method="event order") if exact else None

    best: Plan | None = None
    is_fixed = any(event.kind in (EventKind.LEAVE, EventKind.DUE) for event in orders[0])
    for share in EARLIER if is_fixed else EARLIER[:1]:
        order = best_order([earlier(order, share) for order in orders], safe.problem, of, bound_s, work)
        num_failed = 0
        for trial in range(max(1, min(MAX_PLANS, MAX_JOBS_OF_PLANS // len(problem.jobs))) if order else 0):
            if order is None or (plan := planned(order, trial)) is None:
                break
            is_better = best is None or objective.rank(plan, problem) < objective.rank(best, problem)
            num_failed = 0 if is_better else num_failed + 1
            best = plan if best is None or is_better else best
            is_close = objective.value(best, problem) <= least_value * CLOSE
            if is_close or num_failed == MAX_FAILED or work.is_over():
                break
        if work.is_over() or (best and lateness_s(best, problem) <= SAME * best.makespan_s):
            break
    return best


def within_fair_memory(problem: Problem) -> job_costs.NarrowedProblem | None:
    """Returns the problem with those options that take no more host memory than their share of a node's devices.

    Any such options fit a node together if their devices do. Returns None where a job would have no option left.
    """
    per_device = min(
        (node.host_memory_bytes / node.num_devices for node in problem.nodes if node.host_memory_bytes is not None),
        default=math.inf,
    )
    safe = job_costs.narrowed(problem, lambda _, option: option.host_memory_bytes <= per_device * option.slot)
    if safe is None:
        return None
    nodes = tuple(replace(node, host_memory_bytes=None) for node in problem.nodes)
    jobs = (
        replace(job, options=tuple(replace(o, host_memory_bytes=0) for o in job.options)) for job in safe.problem.jobs
    )
    return replace(safe, problem=replace(safe.problem, nodes=nodes, jobs=tuple(jobs)))


def _planned(periods: Periods, problem: Problem, *, least_s: float, seed: int, work: WorkBudget) -> list[Segment]:
    """Returns the segments of all periods, one after another."""
    shares = _gathered(periods, problem)
    last = {job: p for p, of in enumerate(shares) for job in of}
    segments: list[Segment] = []
    now_s, started = 0.0, {job.id for job in problem.jobs if job.started}
    running = {job.id: job.running for job in problem.jobs if job.running is not None}
    for p, of in enumerate(shares):
        if not of:
            continue
        nodes = tuple(replace(node, available_until_s=None) for node in periods.lp.nodes_in(p))
        jobs = [
            _part(problem.job(job), share, nodes, running.get(job), is_started=job in started, is_last=last[job] == p)
            for job, share in of.items()
        ]
        part = Problem(f"{problem.name}-{p}", nodes, tuple(jobs), problem.switch_cost_s)
        bound = pattern_bound(part)
        with work.part(1 / (len(shares) - p)) as own:
            rows = plan_preemptive(job_costs.folded(part), bound, seed=seed, least_run_s=least_s, work=own)
        if rows is None:
            return []
        length_s = max(row.end_s for row in rows)
        segments += [
            replace(row, start_s=now_s + row.start_s, end_s=now_s + row.end_s, work=row.work * of[row.job])
            for row in rows
        ]
        newest = {row.job: row for row in sorted(rows, key=lambda row: row.end_s)}
        running = {
            job: CurrentRun(row.option, row.devices)
            for job, row in newest.items()
            if row.end_s >= length_s * (1 - 1e-6)
        }
        started |= newest.keys()
        now_s += length_s
    return merged(segments)


def _gathered(periods: Periods, problem: Problem) -> list[dict[str, float]]:
    """Returns the shares of jobs by period; those shorter than a switch go to the period with most of the job."""
    shares, shortest = [dict(of) for of in periods.shares], job_costs.shortest_of(problem)
    for job in problem.jobs:
        own_shares = {p: of[job.id] for p, of in enumerate(shares) if job.id in of}
        if not own_shares:  # so short that rounding has left nothing of it
            shares[-1][job.id] = 1.0
            continue
        longest = max(own_shares, key=lambda p: own_shares[p])
        total = sum(own_shares.values())
        for p, share in own_shares.items():
            if p != longest and share * shortest[job.id] < max(problem.switch_cost_s, MIN_SHARE * shortest[job.id]):
                shares[longest][job.id] += shares[p].pop(job.id)
        for of in shares:
            if job.id in of:
                of[job.id] /= total
    return shares


def _part(
    job: PlanningJob,
    share: float,
    nodes: Sequence[PlanningNode],
    running: CurrentRun | None,
    *,
    is_started: bool,
    is_last: bool,
) -> PlanningJob:
    """Returns a share of a job as a job of its own."""
    there = {node.id for node in nodes}
    stays = running is not None and all(name in there for name, _ in running.devices)
    options = tuple(_share_of(option, share, is_last=is_last) for option in job.options)
    return PlanningJob(job.id, options, running=running if stays else None, started=is_started)


def _share_of(option: Option, share: float, *, is_last: bool) -> Option:
    evaluate_s = option.evaluate_s if is_last else 0.0
    return replace(option, runtime_s=max(1e-3, option.runtime_s * share), evaluate_s=evaluate_s)


def merged(segments: Sequence[Segment]) -> list[Segment]:
    """Returns the segments, where those that continue on idle devices what their job did there before become one."""
    rows = sorted(segments, key=lambda s: (s.start_s, s.end_s, s.job))
    newest_on: dict[tuple[str, int], int] = {}
    newest_of: dict[str, int] = {}
    joined: list[Segment] = []
    for row in rows:
        devices = [(node, device) for node, ids in row.devices for device in ids]
        i = newest_of.get(row.job)
        is_same = i is not None and joined[i].option == row.option and set(joined[i].devices) == set(row.devices)
        if i is not None and is_same and all(newest_on[device] == i for device in devices):
            joined[i] = replace(joined[i], end_s=row.end_s, work=joined[i].work + row.work)
            continue
        newest_of[row.job] = len(joined)
        newest_on |= dict.fromkeys(devices, len(joined))
        joined.append(row)
    return joined
