"""Preemptive plans by the order of events, for jobs that wait, arrive later or are due, and for nodes that go away.

1. Events are releases, last seconds of nodes and deadlines, and the ends of jobs that others wait for; where every end
   counts, the ends of all jobs. A linear program (`event_lp`) finds the periods between events for one order. A local
   search swaps neighbours.
2. Each period is a plain problem, which the preemptive planner plans: every job with the share of its work that it does
   in the period. Jobs that run at the end of one period continue in the next where that is good.
3. The plans of all periods, one after another, become one plan. Retiming makes its times exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ringmaster.tasks.planning.bounds.bounds import pattern_bound
from ringmaster.tasks.planning.bounds.job_costs import shortest_of
from ringmaster.tasks.planning.objectives.objective import Objective, ends_of, lateness_s
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.preemptive.preemptive import plan_preemptive
from ringmaster.tasks.planning.problems.folding import folded
from ringmaster.tasks.planning.problems.parts import Node, Option, PlanningJob, Running
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.with_rules.constrained import exactly
from ringmaster.tasks.planning.with_rules.event_lp import Kind, Periods
from ringmaster.tasks.planning.with_rules.event_order import OrderFound, best_order, earlier, first_orders
from ringmaster.tasks.planning.work import WorkBudget

MAX_SIZE = 1_500  # limit of jobs x periods, above which planning the periods takes too long
EARLIER = (1.0, 0.97, 0.93, 0.88)  # nodes leave and deadlines pass at these shares of their time, until a plan fits
MAX_TRIALS, JOBS_OF_TRIALS = 5, 60  # plans of the periods of one order, and their limit in jobs
MAX_FAILED = 2  # trials in a row that are no better than the best, after which no more are made
CLOSE = 1.02  # trials end where the value is not above its bound by more
PER_RETIMED_S = 0.02  # work of a plan's exact times, per job
LEAST_SHARE = 1e-6  # of a job, in a period
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

    start: a plan, whose ends of jobs are one of the first orders.
    least_value: a lower bound on the objective; trials end close to it.
    least_s: minimum length of a segment of a job that has several.
    work: limits the search.
    """
    of = objective.coefficients(problem)
    safe = within_fair_memory(problem)
    if safe is None or of.prices or (of.latest and len(of.latest) < len(problem.jobs)):
        return None
    orders = list(first_orders(safe.problem, ends_of(start, problem), of, bound_s))
    if (len(orders[0]) + 1) * len(problem.jobs) > MAX_SIZE:
        return None
    search = _Search(problem, safe, objective, least_value, least_s, seed, work)
    best, is_fixed = None, any(event.kind in (Kind.LEAVE, Kind.DUE) for event in orders[0])
    for share in EARLIER if is_fixed else EARLIER[:1]:
        found = best_order([earlier(order, share) for order in orders], safe.problem, of, bound_s, work)
        best = search.improved(best, found, start) if found else best
        if work.is_over() or (best and lateness_s(best, problem) <= SAME * best.makespan_s):
            break
    return best


@dataclass(frozen=True)
class _Search:
    """What the trials for one problem have in common."""

    problem: Problem
    safe: "MemorySafe"
    objective: Objective
    least_value: float
    least_s: float
    seed: int
    work: WorkBudget

    def improved(self, best: Plan | None, found: OrderFound, start: Plan) -> Plan | None:
        """Returns the best of a plan and those that a few trials with different seeds find for an order of events."""
        num_failed = 0
        for trial in range(max(1, min(MAX_TRIALS, JOBS_OF_TRIALS // len(self.problem.jobs)))):
            plan = self._trial(found, MAX_TRIALS * self.seed + trial, start)
            if plan is None:
                break
            is_better = best is None or self._rank(plan) < self._rank(best)
            num_failed = 0 if is_better else num_failed + 1
            best = plan if best is None or is_better else best
            is_close = self.objective.value(best, self.problem) <= self.least_value * CLOSE
            if is_close or num_failed == MAX_FAILED or self.work.is_over():
                break
        return best

    def _trial(self, found: OrderFound, seed: int, start: Plan) -> Plan | None:
        problem, least_s = self.safe.problem, self.least_s
        segments = _planned(found, problem, least_s=least_s, seed=seed, work=self.work)
        self.work.charge(PER_RETIMED_S * len(self.problem.jobs))
        original = [self.safe.original(segment) for segment in segments]
        exact = exactly(self.problem, original, objective=self.objective, least_s=least_s)
        return replace(start, segments=exact, method="event order") if exact else None

    def _rank(self, plan: Plan) -> tuple[float, float, float]:
        return self.objective.rank(plan, self.problem)


@dataclass(frozen=True)
class MemorySafe:
    """A problem in which memory cannot run out; options[job] are the indices that its options have in the original."""

    problem: Problem
    options: Mapping[str, tuple[int, ...]]

    def original(self, segment: Segment) -> Segment:
        """Returns the segment with the option's index in the original problem."""
        return replace(segment, option=self.options[segment.job][segment.option])


def within_fair_memory(problem: Problem) -> MemorySafe | None:
    """Returns the problem with those options that take no more host memory than their share of a node's devices.

    Any such options fit a node together if their devices do. Returns None where a job would have no option left.
    """
    per_device = min(
        (node.host_memory_bytes / node.num_devices for node in problem.nodes if node.host_memory_bytes is not None),
        default=math.inf,
    )
    kept, jobs = {}, []
    for job in problem.jobs:
        fits = [k for k, o in enumerate(job.options) if o.host_memory_bytes <= per_device * o.slot]
        if not fits or (job.running is not None and job.running.option not in fits):
            return None
        kept[job.id] = tuple(fits)
        running = job.running and replace(job.running, option=fits.index(job.running.option))
        options = tuple(replace(job.options[k], host_memory_bytes=0) for k in fits)
        jobs.append(replace(job, options=options, running=running))
    nodes = tuple(replace(node, host_memory_bytes=None) for node in problem.nodes)
    return MemorySafe(replace(problem, nodes=nodes, jobs=tuple(jobs)), kept)


def _planned(found: OrderFound, problem: Problem, *, least_s: float, seed: int, work: WorkBudget) -> list[Segment]:
    """Returns the segments of all periods, one after another."""
    shares = _gathered(found.periods, problem)
    last = {job: p for p, of in enumerate(shares) for job in of}
    segments: list[Segment] = []
    now_s, started = 0.0, {job.id for job in problem.jobs if job.started}
    running = {job.id: job.running for job in problem.jobs if job.running is not None}
    for p, of in enumerate(shares):
        if not of:
            continue
        nodes = tuple(replace(node, available_until_s=None) for node in found.lp.nodes_in(p))
        jobs = [
            _part(problem.job(job), share, nodes, running.get(job), is_started=job in started, is_last=last[job] == p)
            for job, share in of.items()
        ]
        part = Problem(f"{problem.name}-{p}", nodes, tuple(jobs), problem.switch_cost_s)
        bound = pattern_bound(part)
        with work.part(1 / (len(shares) - p)) as own:
            rows = plan_preemptive(folded(part), bound, seed=seed, least_run_s=least_s, work=own)
        if rows is None:
            return []
        length_s = max(row.end_s for row in rows)
        segments += [
            replace(row, start_s=now_s + row.start_s, end_s=now_s + row.end_s, work=row.work * of[row.job])
            for row in rows
        ]
        newest = {row.job: row for row in sorted(rows, key=lambda row: row.end_s)}
        running = {
            job: Running(row.option, row.devices) for job, row in newest.items() if row.end_s >= length_s * (1 - 1e-6)
        }
        started |= newest.keys()
        now_s += length_s
    return merged(segments)


def _gathered(periods: Periods, problem: Problem) -> list[dict[str, float]]:
    """Returns the shares of jobs by period; those shorter than a switch go to the period with most of the job."""
    shares, shortest = [dict(of) for of in periods.shares], shortest_of(problem)
    for job in problem.jobs:
        mine = {p: of[job.id] for p, of in enumerate(shares) if job.id in of}
        if not mine:  # so short that rounding has left nothing of it
            shares[-1][job.id] = 1.0
            continue
        longest = max(mine, key=lambda p: mine[p])
        total = sum(mine.values())
        for p, share in mine.items():
            if p != longest and share * shortest[job.id] < max(problem.switch_cost_s, LEAST_SHARE * shortest[job.id]):
                shares[longest][job.id] += shares[p].pop(job.id)
        for of in shares:
            if job.id in of:
                of[job.id] /= total
    return shares


def _part(
    job: PlanningJob, share: float, nodes: Sequence[Node], running: Running | None, *, is_started: bool, is_last: bool
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
    found: list[Segment] = []
    for row in rows:
        devices = [(node, device) for node, ids in row.devices for device in ids]
        i = newest_of.get(row.job)
        is_same = i is not None and found[i].option == row.option and set(found[i].devices) == set(row.devices)
        if i is not None and is_same and all(newest_on[device] == i for device in devices):
            found[i] = replace(found[i], end_s=row.end_s, work=found[i].work + row.work)
            continue
        newest_of[row.job] = len(found)
        newest_on |= dict.fromkeys(devices, len(found))
        found.append(row)
    return found
