"""Whether all jobs can end by some time, and how many more devices do, or do not, make that possible."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from ringmaster.tasks.planning.bounds.bounds import costs_of, preemptive_bound
from ringmaster.tasks.planning.bounds.job_costs import earliest_ends_s
from ringmaster.tasks.planning.bounds.windows import Rate, costs_of_jobs, rates_of_jobs, rates_of_nodes
from ringmaster.tasks.planning.plans.plan import Certificate, WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import MAX_DEVICES, PlanningNode
from ringmaster.tasks.planning.whatif.gains import (
    Deadline,
    FewerJobs,
    Gain,
    MoreDevices,
    MoreNodes,
    WhatIf,
    changed,
    dependents,
)
from ringmaster.tasks.planning.work import WORK_S

MOST_JOBS = 10  # whose costs are explained
LEAST_SHARE = 1e-6  # of the bound, of a job that binds by its own length


@dataclass(frozen=True, kw_only=True)
class NodePrice:
    """What nodes of one kind contribute to the bound.

    node: one of the `num_nodes` nodes of the kind.
    share: share of the bound that is due to the devices of these nodes, from 0 to 1.
    one_more_s: what one more device of a node gains at most, by the prices alone.
    """

    node: PlanningNode
    num_nodes: int
    share: float
    one_more_s: float


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """What leaving a job out gains.

    gain: `gain.change.jobs` are the job, and after it those that wait for it.
    members: the other jobs that its gang trains, which are left out with it.
    """

    job: str
    gain: Gain
    members: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the nodes and the jobs contribute.

    nodes: by kind.
    own_time: jobs that bind by their own length, which no further device shortens, with their share of the bound; in
        descending order.
    jobs: the jobs that cost most, in descending order.
    """

    nodes: tuple[NodePrice, ...]
    own_time: tuple[tuple[str, float], ...]
    jobs: tuple[JobCost, ...]


def explain(what_if: WhatIf, *, most_jobs: int = MOST_JOBS) -> Explanation:
    """Returns the contributions of all nodes, and the costs of the jobs that cost most."""
    problem = what_if.problem
    prices = _as_windows(what_if.certificate, problem)
    worth: dict[PlanningNode, float] = defaultdict(float)
    own: dict[str, float] = defaultdict(float)
    for node, rate in rates_of_nodes(prices, problem):
        worth[_kind(node)] += _earned(rate, until_s=what_if.bound_s)
    for job, rate in rates_of_jobs(prices, problem):
        own[job] += _earned(rate, until_s=what_if.bound_s)
    total = math.fsum([*worth.values(), *own.values()]) or 1.0
    first = {_kind(node): node for node in reversed(problem.nodes)}
    nodes = tuple(
        NodePrice(
            node=first[kind],
            num_nodes=count,
            share=worth[kind] / total,
            one_more_s=_one_more_s(what_if, first[kind]),
        )
        for kind, count in Counter(map(_kind, problem.nodes)).items()
    )
    binding = [(job, earned / total) for job, earned in own.items() if earned > LEAST_SHARE * total]
    binding.sort(key=lambda pair: -pair[1])
    return Explanation(nodes=nodes, own_time=tuple(binding), jobs=costliest(what_if, most_jobs))


def costliest(what_if: WhatIf, most: int, *, anew: bool = True) -> tuple[JobCost, ...]:
    """Returns the jobs whose work is worth most at the prices, with what leaving them out gains, in that order.

    A job that others wait for is left out with them. A job without which none is left is omitted.

    anew: as for `WhatIf.gain`.
    """
    problem, certificate = what_if.problem, what_if.certificate
    worth = costs_of_jobs(certificate.windows, problem) if certificate.windows else costs_of(certificate, problem)
    together = {job.id: (job.id, *dependents(problem, (job.id,))) for job in problem.jobs}
    sums = {job: sum(worth[name] for name in names) for job, names in together.items() if len(names) < len(worth)}
    first = heapq.nlargest(most, sums, key=lambda job: sums[job])
    found = [
        JobCost(
            job=job,
            gain=what_if.gain(FewerJobs(jobs=together[job]), anew=anew),
            members=tuple(member for name in together[job] for member in problem.job(name).members),
        )
        for job in first
    ]
    return tuple(sorted(found, key=lambda cost: -cost.gain.most_s))


def _as_windows(certificate: Certificate, problem: Problem) -> WindowPrices:
    if certificate.windows:
        return certificate.windows
    slots = {kind: certificate.prices_of(kind) for kind in problem.device_types}
    return WindowPrices((0.0,), (slots,), {job: (price,) for job, price in certificate.job_prices.items()})


def _kind(node: PlanningNode) -> PlanningNode:
    return replace(node, id="")


def _earned(rate: Rate, *, until_s: float) -> float:
    return rate.worth * max(0.0, min(rate.end_s, until_s) - rate.start_s)


def _one_more_s(what_if: WhatIf, node: PlanningNode) -> float:
    change = MoreDevices(num_devices=1, device_type=node.device_type)
    problem = changed(what_if.problem, change, on=node.id)
    return max(0.0, what_if.makespan_s - what_if.bound_by_prices_s(problem))


MAX_MORE = 1024  # devices or nodes that are considered
STEPS = (1, 2, 4, 8)  # beyond what is excluded, for which a plan that ends in time is searched
SAME = 1e-9  # share of a time within which it counts as equal


class DeadlineVerdict(StrEnum):
    """Whether all jobs can end in time: the plan shows it, the bound excludes it, or neither."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class DeadlineAnswer:
    """The answer about a deadline.

    makespan_s: the end of the plan.
    bound_s: no plan ends before.
    longest_job: a job that cannot end in time on any number of devices; "" if there is none.
    longest_job_s: its earliest end.
    unit: one more device or node, by which `too_few` and `enough` count; None where nothing is missing.
    too_few: with so many more, no plan ends in time; 0 also where it is unknown whether any more are needed.
    enough: with so many more, a plan ends in time; None where no such number is known.
    """

    question: Deadline
    verdict: DeadlineVerdict
    makespan_s: float
    bound_s: float
    longest_job: str = ""
    longest_job_s: float = 0.0
    unit: MoreDevices | MoreNodes | None = None
    too_few: int = 0
    enough: int | None = None


def answer_deadline(
    what_if: WhatIf,
    question: Deadline,
    *,
    searches: bool = True,
    work_s: float = WORK_S,
    time_limit_s: float = 300.0,
    seed: int = 0,
) -> DeadlineAnswer:
    """Returns whether all jobs can end in time.

    Where the plan is late, more devices of the commonest kind are considered: on the node if there is only one, else as
    further nodes.

    searches: whether to search for plans with more devices, beyond quick ones. The limits are those of each search.
    """
    due_s = question.due_s
    known = DeadlineAnswer(
        question=question, verdict=DeadlineVerdict.UNKNOWN, makespan_s=what_if.makespan_s, bound_s=what_if.bound_s
    )
    if what_if.makespan_s <= due_s * (1 + SAME):
        return replace(known, verdict=DeadlineVerdict.YES)
    if what_if.bound_s > due_s * (1 + SAME):
        known = replace(known, verdict=DeadlineVerdict.NO)
    ends_s = earliest_ends_s(what_if.problem)
    last = max(ends_s, key=lambda job: ends_s[job])
    if ends_s[last] > due_s * (1 + SAME):
        return replace(known, verdict=DeadlineVerdict.NO, longest_job=last, longest_job_s=ends_s[last])
    unit = unit_of(what_if.problem)
    most = _most_of(unit, what_if.problem)
    too_few = _too_few(what_if, unit, due_s, most=most) if known.verdict is DeadlineVerdict.NO else 0
    enough = None
    if too_few < most:
        search = partial(what_if.planned, work_s=work_s, time_limit_s=time_limit_s, seed=seed) if searches else None
        enough = _enough(what_if, unit, due_s, range(too_few, most + 1), search)
    return replace(known, unit=unit, too_few=too_few, enough=enough)


def unit_of(problem: Problem) -> MoreDevices | MoreNodes:
    """Returns one more device where there is one node, else one more node of the commonest type and size."""
    if len(problem.nodes) == 1:
        return MoreDevices(num_devices=1, device_type=problem.nodes[0].device_type)
    kinds = Counter((node.device_type, node.num_devices) for node in problem.nodes)
    (kind, size), _ = kinds.most_common(1)[0]
    return MoreNodes(num_devices=size, device_type=kind)


def times(unit: MoreDevices | MoreNodes, count: int) -> MoreDevices | MoreNodes:
    """Returns `count` times as many devices or nodes."""
    if isinstance(unit, MoreNodes):
        return replace(unit, num_nodes=count * unit.num_nodes)
    return replace(unit, num_devices=count * unit.num_devices)


def _most_of(unit: MoreDevices | MoreNodes, problem: Problem) -> int:
    """Returns how many further devices or nodes are considered; a node has room for so many devices."""
    if isinstance(unit, MoreNodes):
        return MAX_MORE
    return min(MAX_MORE, MAX_DEVICES - max(node.num_devices for node in problem.nodes))


def _too_few(what_if: WhatIf, unit: MoreDevices | MoreNodes, due_s: float, *, most: int) -> int:
    """Returns the largest number of further devices or nodes with which the bound excludes an end in time."""

    def is_excluded(count: int) -> bool:
        change = times(unit, count)
        problem = changed(what_if.problem, change)
        if what_if.bound_by_prices_s(problem) > due_s * (1 + SAME):
            return True
        return preemptive_bound(problem).seconds > due_s * (1 + SAME)

    low, high = 0, 1
    while high <= most and is_excluded(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_excluded(middle) else (low, middle)
    return low


def _enough(
    what_if: WhatIf,
    unit: MoreDevices | MoreNodes,
    due_s: float,
    counts: range,
    search: Callable[[Gain], Gain] | None,
) -> int | None:
    """Returns a number of further devices or nodes with which a plan ends in time; None where none was found.

    counts: from the largest number that is known not to suffice. A plan is searched for each of `STEPS` from there.
    """
    for count in (counts.start + step for step in STEPS if counts.start + step in counts):
        gain = what_if.gain(times(unit, count))
        if search is not None and not _is_in_time(gain.makespan_s, due_s):
            gain = search(gain)
        if _is_in_time(gain.makespan_s, due_s):
            return count
    return None


def _is_in_time(makespan_s: float | None, due_s: float) -> bool:
    return makespan_s is not None and makespan_s <= due_s * (1 + SAME)
