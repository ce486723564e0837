"""An independent verifier of plans and certificates: no solver and nothing but the standard library.

It shares no code with what makes plans, so that a mistake there is found here.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, combinations, pairwise

from tasks.planning.plan import Certificate, Plan, Segment
from tasks.planning.problem import Option, PlanningJob, Problem

MAX_STATES = 600  # of the dynamic program that checks work prices


def verify(plan: Plan, problem: Problem) -> list[str]:
    """The faults of a plan, in words; an empty list is a valid plan whose bound and certificate hold.

    1. Work: a segment does (end - start - overhead) / runtime of its job, and a job's segments do all of it.
    2. Overhead: a segment that does not continue the one before (no pause, same option, same devices) pays
       its option's start-up, and the switch cost unless it is the job's first; one that is not continued
       pays a save, and the job's last one an evaluation.
    3. Gangs: of the option's size, spread and type of device, on devices that exist and are not gone yet,
       none of which serves two segments at a time, and with host memory for all gangs of a node.
    4. Order: a job's segments do not overlap, start after its release and after every job ended that it
       waits for, and end by its deadline.
    5. Bounds: the lower bound is not above the makespan, and the certificate proves it; likewise for the
        objective.
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
    faults += _memory_faults(plan, problem, tolerance_s) if not faults else []
    return faults + list(_bound_faults(plan, problem))


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


def objective_value(plan: Plan, problem: Problem, objective: str) -> float:
    """A plan's makespan, its sum of weight x end (`weighted`), or what its devices cost (`cost`)."""
    if objective == "weighted":
        ends: dict[str, float] = {}
        for segment in plan.segments:
            ends[segment.job] = max(segment.end_s, ends.get(segment.job, 0.0))
        return sum(job.weight * ends.get(job.id, 0.0) for job in problem.jobs)
    if objective == "cost":
        price = {node.id: node.price for node in problem.nodes}
        held = ((s.end_s - s.start_s, node, len(ids)) for s in plan.segments for node, ids in s.devices)
        return sum(seconds * count * price.get(node, 0.0) for seconds, node, count in held)
    return plan.makespan_s


def cheapest(job: PlanningJob, certificate: Certificate, types: Iterable[str]) -> float:
    """What a job costs at least at the prices, work alone."""
    own = certificate.job_prices.get(job.id, 0.0)
    return min(
        (o.num_nodes * certificate.prices_of(kind).get(o.slot, 0.0) + own) * o.runtime_s
        for o in job.options
        for kind in types
        if o.device_type in ("", kind)
    )


def _pack(prices: Mapping[int, float], problem: Problem) -> list[float]:
    """The most that slots which together fit g devices are worth, for each g."""
    pack = [0.0]
    for size in range(1, max(node.num_devices for node in problem.nodes) + 1):
        fits = (pack[size - slot] + price for slot, price in prices.items() if 0 < slot <= size)
        pack.append(max([pack[-1], *fits]))
    return pack


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
    nodes = {node.id: node for node in problem.nodes}
    if len({node for node, _ in segment.devices}) != len(segment.devices):
        yield "names a node twice"
    if len(segment.devices) != option.num_nodes:
        yield f"is on {len(segment.devices)} nodes, its option says {option.num_nodes}"
    for node, ids in segment.devices:
        if len(ids) != option.slot or len(set(ids)) != len(ids):
            yield f"has devices {ids} on node {node}, its option takes {option.slot} there"
        if node not in nodes or not all(0 <= device < nodes[node].num_devices for device in ids):
            yield f"is on a device that does not exist: {node}:{ids}"
            continue
        if option.device_type not in ("", nodes[node].device_type):
            yield f"is on {node}, whose devices are {nodes[node].device_type!r}, not {option.device_type!r}"
        until_s = nodes[node].available_until_s
        if until_s is not None and segment.end_s > until_s + tolerance_s:
            yield f"ends at {segment.end_s}, but node {node} goes away at {until_s}"


def _memory_faults(plan: Plan, problem: Problem, tolerance_s: float) -> Iterator[str]:
    for node in problem.nodes:
        if node.host_memory_bytes is None:
            continue
        here = [
            (s.start_s, s.end_s, problem.job(s.job).options[s.option].host_memory_bytes)
            for s in plan.segments
            if any(name == node.id for name, _ in s.devices)
        ]
        for now_s, _, _ in here:
            used = sum(size for a, b, size in here if a <= now_s + tolerance_s and b > now_s + 2 * tolerance_s)
            if used > node.host_memory_bytes:
                yield f"node {node.id}: gangs take {used} bytes of {node.host_memory_bytes} at {now_s}"


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
    goes_on = [
        a.option == b.option and _gang(a) == _gang(b) and abs(b.start_s - a.end_s) <= tolerance_s
        for a, b in pairwise(mine)
    ]
    for k, segment in enumerate(mine):
        option, is_last = job.options[segment.option], k == len(mine) - 1
        starts, stops = k == 0 or not goes_on[k - 1], is_last or not goes_on[k]
        owed_s = (option.startup_s + (switch_cost_s if k else 0.0)) if starts else 0.0
        owed_s += (option.save_s if stops else 0.0) + (option.evaluate_s if is_last else 0.0)
        if segment.overhead_s < owed_s * (1 - 1e-9):
            verb = "switches" if k and starts else "runs"
            yield f"job {job.id}: {verb} at {segment.start_s} but pays {segment.overhead_s} of {owed_s}"
    if not mine:
        return
    if mine[0].start_s < job.release_s - tolerance_s:
        yield f"job {job.id}: starts at {mine[0].start_s}, before its release at {job.release_s}"
    if job.deadline_s is not None and mine[-1].end_s > job.deadline_s + tolerance_s:
        yield f"job {job.id}: ends at {mine[-1].end_s}, after its deadline at {job.deadline_s}"
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
    if plan.value is not None:
        found = objective_value(plan, problem, plan.objective)
        if abs(found - plan.value) > 1e-6 * max(1.0, abs(found)):
            yield f"{plan.objective} {plan.value} claimed, {found} found"
        if plan.value_bound is not None and plan.value_bound > found * (1 + 1e-6):
            yield f"bound {plan.value_bound} on {plan.objective} above {found}"
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
