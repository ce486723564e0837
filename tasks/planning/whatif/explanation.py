"""Why a plan is not shorter: what the nodes and the jobs contribute at the prices that prove its bound."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from ringmaster.tasks.planning.bounds.certificates import costs_of
from ringmaster.tasks.planning.bounds.windows import Rate, costs_of_jobs, rates_of_jobs, rates_of_nodes
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.plans.window_prices import WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningNode
from ringmaster.tasks.planning.whatif.changes import FewerJobs, MoreDevices, changed, dependents
from ringmaster.tasks.planning.whatif.gains import Gain, WhatIf

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
