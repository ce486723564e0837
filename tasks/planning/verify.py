"""An independent verifier of plans and certificates: no solver and nothing but the standard library.

It shares no code with what makes plans, so that a mistake there is found here.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise

from tasks.planning.plan import Certificate, Plan, Segment
from tasks.planning.problem import Option, PlanningJob, Problem

MAX_STATES = 600  # of the dynamic program that checks work prices


def verify(plan: Plan, problem: Problem) -> list[str]:
    """The faults of a plan, in words; an empty list is a valid plan whose bound and certificate hold.

    1. Work: a segment does (end - start - overhead) / runtime of its job, and a job's segments do all of it.
    2. Switches: a segment that is not the job's first pays the switch cost, unless it continues the one
       before with no pause, under the same option and on the same devices.
    3. Gangs: of the option's size and spread, on devices that exist, none of which serves two segments at a
        time.
    4. Order: a job's segments do not overlap, and start after every job ended that it waits for.
    5. Bounds: the lower bound is not above the makespan, and the certificate proves it.
    """
    jobs = {job.id: job for job in problem.jobs}
    tolerance_s = min(0.01, 1e-6 * abs(plan.makespan_s) + 1e-9) if math.isfinite(plan.makespan_s) else 0.0
    faults: list[str] = []
    by_job: dict[str, list[Segment]] = {job_id: [] for job_id in jobs}
    by_device: dict[tuple[str, int], list[Segment]] = {}
    for i, segment in enumerate(plan.segments):
        place = f"segment {i} (job {segment.job})"
        fault = _unreadable(segment, jobs)
        if fault:
            faults.append(f"{place}: {fault}")
            continue
        option = jobs[segment.job].options[segment.option]
        faults += [f"{place}: {fault}" for fault in _segment_faults(segment, option, problem, tolerance_s)]
        by_job[segment.job].append(segment)
        for node, ids in segment.devices:
            for device in ids:
                by_device.setdefault((node, device), []).append(segment)
    for (node, device), uses in by_device.items():
        for a, b in pairwise(sorted(uses, key=lambda s: (s.start_s, s.end_s))):
            if b.start_s < a.end_s - tolerance_s:
                faults.append(f"device {node}:{device} serves {a.job} and {b.job} at {b.start_s}")
    for job in problem.jobs:
        faults += _job_faults(job, by_job, problem.switch_cost_s, tolerance_s)
    return faults + list(_bound_faults(plan, problem))


def certified_bound(certificate: Certificate, problem: Problem) -> float:
    """Seconds below which the certificate proves that no plan, preemptive or not, can end.

    With slot prices w_s and job prices l_j, all >= 0, weak duality gives

        T >= sum_j min_o (nodes_o w_slot(o) + l_j) runtime_o / (sum_n pack(G_n) + sum_j l_j)

    where pack(G) is the most that slots which together fit G devices are worth: whatever runs on a node at
    one moment is worth at most pack(G), a job runs once at a time, and doing job j costs at least its
    cheapest option. With work prices, the formula is `bound_by_work`.
    Raises ValueError where a price is negative or not finite.
    """
    prices, job_prices = certificate.slot_prices, certificate.job_prices
    every = [*prices.values(), *job_prices.values(), *certificate.work_prices.values()]
    if any(not math.isfinite(price) or price < 0 for price in every):
        raise ValueError("a price is negative or not finite")
    if certificate.work_prices:
        return bound_by_work(certificate.work_prices, problem)
    pack = [0.0]
    for size in range(1, max(node.num_devices for node in problem.nodes) + 1):
        fits = (pack[size - slot] + price for slot, price in prices.items() if 0 < slot <= size)
        pack.append(max([pack[-1], *fits]))
    cost = sum(_cheapest(job, prices, job_prices.get(job.id, 0.0)) for job in problem.jobs)
    worth = sum(pack[node.num_devices] for node in problem.nodes) + sum(job_prices.values())
    return cost / worth if worth else 0.0


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


def _cheapest(job: PlanningJob, prices: Mapping[int, float], job_price: float) -> float:
    return min((o.num_nodes * prices.get(o.slot, 0.0) + job_price) * o.runtime_s for o in job.options)


def _unreadable(segment: Segment, jobs: Mapping[str, PlanningJob]) -> str | None:
    if segment.job not in jobs:
        return "no such job"
    if not isinstance(segment.option, int) or not 0 <= segment.option < len(jobs[segment.job].options):
        return f"no such option: {segment.option!r}"
    numbers = (segment.start_s, segment.end_s, segment.work, segment.overhead_s)
    if not all(math.isfinite(number) for number in numbers):
        return "a number is not finite"
    return None


def _segment_faults(segment: Segment, option: Option, problem: Problem, tolerance_s: float) -> Iterator[str]:
    if segment.start_s < -tolerance_s or segment.end_s < segment.start_s - tolerance_s:
        yield f"impossible times {segment.start_s} to {segment.end_s}"
    if segment.overhead_s < 0 or segment.work < -1e-9:
        yield "negative overhead or work"
    work = (segment.end_s - segment.start_s - segment.overhead_s) / option.runtime_s
    if abs(work - segment.work) * option.runtime_s > tolerance_s:
        yield f"claims work {segment.work}, its time gives {work}"
    sizes = {node.id: node.num_devices for node in problem.nodes}
    if len({node for node, _ in segment.devices}) != len(segment.devices):
        yield "names a node twice"
    if len(segment.devices) != option.num_nodes:
        yield f"is on {len(segment.devices)} nodes, its option says {option.num_nodes}"
    for node, ids in segment.devices:
        if len(ids) != option.slot or len(set(ids)) != len(ids):
            yield f"has devices {ids} on node {node}, its option takes {option.slot} there"
        if node not in sizes or not all(0 <= device < sizes[node] for device in ids):
            yield f"is on a device that does not exist: {node}:{ids}"


def _job_faults(
    job: PlanningJob, by_job: Mapping[str, list[Segment]], switch_cost_s: float, tolerance_s: float
) -> Iterator[str]:
    mine = sorted(by_job[job.id], key=lambda s: (s.start_s, s.end_s))
    done = sum(segment.work for segment in mine)
    if not done >= 1 - 1e-6:
        yield f"job {job.id}: work {done:.9f} of 1"
    for a, b in pairwise(mine):
        if b.start_s < a.end_s - tolerance_s:
            yield f"job {job.id}: its segments overlap at {b.start_s}"
        stays = a.option == b.option and _gang(a) == _gang(b) and abs(b.start_s - a.end_s) <= tolerance_s
        if not stays and b.overhead_s < switch_cost_s * (1 - 1e-9):
            yield f"job {job.id}: switches at {b.start_s} but pays {b.overhead_s} of {switch_cost_s}"
    if not mine:
        return
    for other in job.after:
        ended_s = max((segment.end_s for segment in by_job[other]), default=0.0)
        if mine[0].start_s < ended_s - tolerance_s:
            yield f"job {job.id}: starts at {mine[0].start_s}, but waits for {other}, which ends at {ended_s}"


def _gang(segment: Segment) -> frozenset[tuple[str, int]]:
    return frozenset((node, device) for node, ids in segment.devices for device in ids)


def _bound_faults(plan: Plan, problem: Problem) -> Iterator[str]:
    bound_s, makespan_s = plan.lower_bound_s, plan.makespan_s
    if bound_s is not None and not bound_s <= makespan_s * (1 + 1e-6):
        yield f"lower bound {bound_s} above the makespan {makespan_s}"
    if plan.certificate is None:
        return
    try:
        proved_s = certified_bound(plan.certificate, problem)
    except ValueError as error:
        yield f"certificate: {error}"
        return
    if not proved_s <= makespan_s * (1 + 1e-6):
        yield f"certificate proves {proved_s}, above the makespan {makespan_s}"
    if bound_s is not None and not bound_s <= proved_s * (1 + 1e-6):
        yield f"lower bound {bound_s} claimed, the certificate proves {proved_s}"
