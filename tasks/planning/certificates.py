"""What the prices of a certificate prove, recomputed with nothing but arithmetic: no solver is believed."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate, combinations

from tasks.planning.plan import Certificate
from tasks.planning.problem import PlanningJob, Problem

MAX_STATES = 600  # of the dynamic program that checks work prices


def certified_bound(certificate: Certificate, problem: Problem) -> float:
    """Seconds below which the certificate proves that no plan, preemptive or not, can end.

    With slot prices w_s and job prices l_j, all >= 0, weak duality gives

        T >= sum_j (min_o (nodes_o w_slot(o) + l_j) runtime_o + l_j release_j) / (sum_n pack(G_n) + sum_j l_j)

    where pack(G) is the most that slots which together fit G devices are worth: whatever runs on a node at
    one moment is worth at most pack(G), a job runs once at a time from its release on, and doing job j costs
    at least its cheapest option. Nodes of other types of devices have prices of their own. A node that goes
    away at U is worth at most pack(G) U, which may be taken from the numerator instead of pack(G) from the
    denominator. With work prices, the formula is `bound_by_work`. Raises ValueError where a price is
    negative or not finite.
    """
    every = [*certificate.slot_prices.values(), *certificate.job_prices.values(), *certificate.work_prices.values()]
    every += [price for prices in certificate.typed_prices.values() for price in prices.values()]
    if any(not math.isfinite(price) or price < 0 for price in every):
        raise ValueError("a price is negative or not finite")
    if certificate.work_prices:
        return bound_by_work(certificate.work_prices, problem)
    own, types = certificate.job_prices, {node.device_type for node in problem.nodes}
    pack = {kind: _pack(certificate.prices_of(kind), problem) for kind in types}
    cost = sum(cheapest(job, certificate, types) + own.get(job.id, 0.0) * job.release_s for job in problem.jobs)
    worth = [(pack[node.device_type][node.num_devices], node.available_until_s) for node in problem.nodes]
    all_own = sum(own.values())
    total = sum(w for w, _ in worth) + all_own
    lasting = sum(w for w, until_s in worth if until_s is None) + all_own
    ending = sum(w * until_s for w, until_s in worth if until_s is not None)
    return max(cost / total if total else 0.0, (cost - ending) / lasting if lasting else 0.0)


def weighted_bound(certificate: Certificate, problem: Problem) -> float:
    """What no plan's sum of weight x end can go below, by slot prices.

    At the prices the nodes do W = sum_n pack(G_n) of work a second, and job j is p_j = min_o nodes_o
    w_slot(o) runtime_o of it. So no plan ends jobs earlier than one machine of that speed, for which the
    order of p_j / weight_j is best (Smith, 1956); nor does any job end before its release and its fastest
    option.
    """
    types = {node.device_type for node in problem.nodes}
    slots = Certificate(slot_prices=certificate.slot_prices, typed_prices=certificate.typed_prices)
    speed = sum(_pack(slots.prices_of(n.device_type), problem)[n.num_devices] for n in problem.nodes)
    alone = sum(job.weight * (job.release_s + min(o.whole_s for o in job.options)) for job in problem.jobs)
    if not speed:
        return alone
    sizes = [(cheapest(job, slots, types) / speed, job.weight) for job in problem.jobs if job.weight > 0]
    sizes.sort(key=lambda pair: pair[0] / pair[1])
    ends = accumulate(size for size, _ in sizes)
    return max(alone, sum(weight * end for end, (_, weight) in zip(ends, sizes, strict=True)))


def cost_bound(problem: Problem) -> float:
    """What no plan can cost less than: every job under its cheapest option on the cheapest nodes that can
    hold it."""
    return sum(
        min(
            option.num_devices * option.runtime_s * min(n.price for n in problem.nodes if option.runs_on(n))
            for option in job.options
        )
        for job in problem.jobs
    )


def cheapest(job: PlanningJob, certificate: Certificate, types: Iterable[str]) -> float:
    """What a job costs at least at the prices, work alone."""
    own = certificate.job_prices.get(job.id, 0.0)
    return min(
        (o.num_nodes * certificate.prices_of(kind).get(o.slot, 0.0) + own) * o.runtime_s
        for o in job.options
        for kind in types
        if o.device_type in ("", kind)
    )


def bound_by_work(work_prices: Mapping[str, float], problem: Problem) -> float:
    """Seconds that the prices p_j of the jobs' whole work prove.

        T >= sum_j p_j / max_c sum_{(j, o) in c} p_j / runtime_o

    where c is any set of (job, option), each job at most once, that the nodes hold together: no moment of
    any plan earns more than that, and all work must be earned. The maximum is a dynamic program over the
    devices left free on each node, like nodes taken as one. Raises ValueError where that has more than
    MAX_STATES states.
    """
    if num_states(problem) > MAX_STATES:
        raise ValueError("work prices cannot be checked on so many nodes")
    best = {tuple(sorted(node.num_devices for node in problem.nodes)): 0.0}
    for job in problem.jobs:
        price = work_prices.get(job.id, 0.0)
        if price <= 0:
            continue
        fastest: dict[tuple[int, int], float] = {}
        for option in job.options:
            key = (option.num_nodes, option.slot)
            fastest[key] = min(option.runtime_s, fastest.get(key, math.inf))
        after = dict(best)
        for free, worth in best.items():
            for (num_nodes, slot), runtime_s in fastest.items():
                for chosen in set(combinations(free, num_nodes)):
                    if min(chosen) >= slot:
                        left = list(free)
                        for size in chosen:
                            left.remove(size)
                        state = tuple(sorted([*left, *(size - slot for size in chosen)]))
                        after[state] = max(after.get(state, 0.0), worth + price / runtime_s)
        best = after
    most = max(best.values())
    return sum(work_prices.get(job.id, 0.0) for job in problem.jobs) / most if most else 0.0


def num_states(problem: Problem) -> int:
    """How many ways there are to have devices free on the nodes, like nodes taken as one."""
    sizes = Counter(node.num_devices for node in problem.nodes)
    return math.prod(math.comb(size + count, count) for size, count in sizes.items())


def _pack(prices: Mapping[int, float], problem: Problem) -> list[float]:
    """The most that slots which together fit g devices are worth, for each g."""
    pack = [0.0]
    for size in range(1, max(node.num_devices for node in problem.nodes) + 1):
        fits = (pack[size - slot] + price for slot, price in prices.items() if 0 < slot <= size)
        pack.append(max([pack[-1], *fits]))
    return pack
