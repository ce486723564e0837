"""Lower bounds on any plan: the pattern LP with its dual prices, and its MILP for plans without preemption.

Where order, releases or leaving nodes decide when something can run, a second LP divides time into windows.

Over its whole length, any plan gives each (job, option) some seconds, and each node uses each pattern (a way to divide
the node into slots) for some seconds. The pattern LP requires only that these seconds agree, and ignores when they
occur. The LP is small, and its bound is within a percent of the plans that are found.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from typing import Any

from ringmaster.tasks.planning.bounds import job_costs, windows
from ringmaster.tasks.planning.bounds.completions import completion_bound, completion_certificate
from ringmaster.tasks.planning.plans.plan import Certificate, Plan, WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem, frontier, least_within
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob
from ringmaster.text import enumerated

MAX_STATES = 600  # limit of the dynamic program that checks work prices


def certified_bound(certificate: Certificate, problem: Problem) -> float:
    """Returns the seconds before which no plan, preemptive or not, can end, as the certificate proves.

    With slot prices w_s and job prices l_j, all >= 0, weak duality gives T, the least time at which

        sum_n pack(G_n) min(T, end_n) + sum_j l_j T  >=  sum_j (cost_j + l_j release_j)

    pack(G) is the maximum worth of slots that fit G devices together. The inequality holds for every plan: what runs on
    a node at one moment is worth at most pack(G), nothing runs there after the node becomes unavailable at end_n, and a
    job runs once at a time, from its release on. Where all nodes stay available, T is the right side divided by sum_n
    pack(G_n) + sum_j l_j.
    cost_j is the least that the job costs, see `costs_of`. Nodes with other types of devices have prices of their own.
    A device that a user with a quota of Q devices holds costs a further price q per second; all of its jobs together
    pay at most Q q per second, which is added to the left side.
    With work prices, the formula is that of `bound_by_work`; with prices by window, that of `window_bound`.

    The result is infinite where the nodes become unavailable too early for all work. Raises ValueError where a price is
    negative or not finite.
    """
    if certificate.completions is not None:
        raise ValueError("prices of completions prove no bound on the last end")
    if certificate.due is not None:
        raise ValueError("prices by due date prove no bound on the last end")
    if certificate.windows is not None:
        return windows.window_bound(certificate.windows, problem)
    certificate = _scaled(certificate)
    if certificate.work_prices:
        return bound_by_work(certificate.work_prices, problem)
    own = certificate.job_prices
    cost = sum(costs_of(certificate, problem).values())
    cost += sum(own.get(job.id, 0.0) * job.release_s for job in problem.jobs)
    pack = {kind: job_costs.pack_of(certificate.prices_of(kind), problem) for kind in problem.device_types}
    quotas = sum(price * problem.quotas.get(user, 0) for user, price in certificate.quota_prices.items())
    rates = [windows.Rate(0.0, math.inf, sum(own.values()) + quotas)]
    for node in problem.nodes:
        until_s = math.inf if node.available_until_s is None else node.available_until_s
        rates.append(windows.Rate(0.0, until_s, pack[node.device_type][node.num_devices]))
    return windows.time_to_earn(cost, rates)


def _scaled(certificate: Certificate) -> Certificate:
    """Returns prices in another unit, which prove the same. Raises ValueError where one is negative or not finite."""
    every: list[Mapping[Any, float]] = [certificate.slot_prices, *certificate.typed_prices.values()]
    every += [certificate.job_prices, certificate.work_prices, certificate.cover_prices, certificate.quota_prices]
    scaled = job_costs.scaling_of(price for prices in every for price in prices.values())

    def changed(prices: Mapping[Any, float]) -> dict[Any, float]:
        return {key: scaled(price) for key, price in prices.items()}

    return Certificate(
        changed(certificate.slot_prices),
        job_prices=changed(certificate.job_prices),
        work_prices=changed(certificate.work_prices),
        typed_prices={kind: changed(prices) for kind, prices in certificate.typed_prices.items()},
        cover_prices=changed(certificate.cover_prices),
        quota_prices=changed(certificate.quota_prices),
    )


def costs_of(certificate: Certificate, problem: Problem) -> dict[str, float]:
    """Returns the least that each job costs at the prices w_s of slots and l_j of jobs, by job id.

    Where every option is for one job, the cost is `cheapest`. Where options train several jobs, it is the cover price
    pi_j, divided by r, with

        r = max_o sum_{j in group(o)} pi_j / (nodes_o w_slot(o) + sum_{j in group(o)} l_j) runtime_o

    so that the jobs of an option together are charged no more than the option costs. Without cover prices, pi_j is the
    least that a job could pay if each option's cost were shared evenly.
    """
    types = problem.device_types
    if not problem.is_fused:
        return {job.id: cheapest(job, certificate, types, problem.switch_cost_s) for job in problem.jobs}
    own, rows = certificate.job_prices, []
    for job in problem.jobs:
        quota_price = certificate.quota_prices.get(job.user, 0.0)
        for o in job.options:
            members = (job.id, *o.jobs)
            kinds = types if not o.device_type else (o.device_type,)
            price = o.num_nodes * min(certificate.prices_of(kind).get(o.slot, 0.0) for kind in kinds)
            price += quota_price * o.num_devices
            rows.append((members, (price + sum(own.get(name, 0.0) for name in members)) * o.runtime_s))
    return _covering(rows, certificate.cover_prices)


def _covering(rows: Sequence[tuple[tuple[str, ...], float]], wanted: Mapping[str, float]) -> dict[str, float]:
    """Returns a charge for each job, such that no row of (jobs, cost) is charged more than its cost.

    The charges are `wanted`, scaled so that one row is charged exactly its cost. Without `wanted`, they are even shares
    of the costs.
    """
    shares: dict[str, float] = {}
    for members, cost in rows:
        for name in members:
            shares[name] = min(cost / len(members), shares.get(name, math.inf))
    if not wanted:
        return shares
    charged = {name: wanted.get(name, 0.0) for name in shares}
    sums = [(sum(charged[name] for name in members), cost) for members, cost in rows]
    if any(charge > 0 and cost <= 0 for charge, cost in sums):
        return dict.fromkeys(shares, 0.0)
    most = max((charge / cost for charge, cost in sums if charge > 0), default=1.0)
    return {name: price / most for name, price in charged.items()}


def certified_ends_bound(certificate: Certificate, problem: Problem, weights: Mapping[str, float]) -> float:
    """Returns a lower bound on the sum of weight x end of any plan, as the certificate proves.

    The formula is that of `completion_bound` where the certificate has prices of completions, and otherwise
    that of `weighted_bound`. Raises ValueError where a price is negative or not finite.
    """
    if certificate.completions is not None:
        return completion_bound(certificate.completions, problem, weights)
    slots = Certificate(slot_prices=certificate.slot_prices, typed_prices=certificate.typed_prices)
    return weighted_bound(_scaled(slots), problem, weights)


def weighted_bound(certificate: Certificate, problem: Problem, weights: Mapping[str, float]) -> float:
    """Returns a lower bound on the sum of weight x end of any plan, by slot prices and by the weights of the jobs.

    At the prices, the nodes do W = sum_n pack(G_n) of work a second, and job j is p_j (`costs_of`) of it. So no plan
    ends jobs earlier than one machine of that speed, for which the ascending order of p_j / weight_j is best (Smith,
    1956). Nor does any job end before its release plus the time of its fastest option.
    """
    shortest = job_costs.shortest_of(problem)
    speed = sum(job_costs.pack_of(certificate.prices_of(n.device_type), problem)[n.num_devices] for n in problem.nodes)
    alone = sum(weights.get(job.id, 0.0) * (job.release_s + shortest[job.id]) for job in problem.jobs)
    if not speed:
        return alone
    costs = costs_of(certificate, problem)
    sizes = [(costs[job] / speed, weight) for job, weight in weights.items() if weight > 0]
    sizes.sort(key=lambda pair: pair[0] / pair[1])
    ends = accumulate(size for size, _ in sizes)
    return max(alone, sum(weight * end for end, (_, weight) in zip(ends, sizes, strict=True)))


def cost_bound(problem: Problem, prices: Mapping[str, float]) -> float:
    """Returns a lower bound on the price of any plan: each job's cheapest option on the cheapest nodes that fit it.

    A job with a deadline may need a faster option: its cheapest mix of options that takes no longer than from its head
    to the deadline is another lower bound.

    prices: by node, of one device for one second.
    """
    cheapest_node: dict[tuple[str, int, int], float] = {}

    def price(o: Option) -> float:
        kind = (o.device_type, o.slot, o.host_memory_bytes)
        if kind not in cheapest_node:
            cheapest_node[kind] = min(prices.get(n.id, 0.0) for n in problem.nodes if o.runs_on(n))
        return o.num_devices * cheapest_node[kind]

    if problem.is_fused:
        rows = [((job.id, *o.jobs), price(o) * o.runtime_s) for job in problem.jobs for o in job.options]
        return sum(_covering(rows, {}).values())
    heads_s, total = job_costs.earliest_starts_s(problem), 0.0
    for job in problem.jobs:
        least = job_costs.least_of(job, [price(o) for o in job.options], problem.switch_cost_s)
        if job.deadline_s is not None:
            points = frontier((o.runtime_s, price(o) * o.runtime_s) for o in job.options)
            within = least_within(points, job.deadline_s - heads_s[job.id])
            least = max(least, within) if within < math.inf else least  # else no plan meets the deadline
        total += least
    return total


def cheapest(job: PlanningJob, certificate: Certificate, types: Iterable[str], switch_cost_s: float = 0.0) -> float:
    """Returns the least that a job costs at the prices, including start-up, save, evaluation and switches."""
    own, of_quota = certificate.job_prices.get(job.id, 0.0), certificate.quota_prices.get(job.user, 0.0)
    prices = [
        min(
            (o.num_nodes * certificate.prices_of(kind).get(o.slot, 0.0) + own + of_quota * o.num_devices)
            for kind in types
            if o.device_type in ("", kind)
        )
        for o in job.options
    ]
    return job_costs.least_of(job, prices, switch_cost_s)


def bound_by_work(work_prices: Mapping[str, float], problem: Problem) -> float:
    """Returns the lower bound in seconds that the prices p_j of the jobs' whole work prove.

        T >= sum_j p_j c_j / max_c sum_{(j, o) in c} p_j / whole_o

    whole_o are the seconds of the whole job in one segment, and c is any set of (job, option) that the nodes hold
    together, each job at most once: no moment of any plan earns more than the maximum. If a second under option o is
    worth 1 / whole_o, a job's seconds are worth at least c_j (`least_of`), which is 1 where jobs pay nothing besides
    runtimes.
    The maximum is a dynamic program over the free devices of each node, where nodes of equal size are interchangeable.
    Raises ValueError where options train several jobs or the program has more than MAX_STATES states.
    """
    if problem.is_fused:
        raise ValueError("work prices cannot be checked where options carry several jobs")
    if num_states(problem) > MAX_STATES:
        raise ValueError("work prices cannot be checked on so many nodes")
    best, earned = {tuple(sorted(node.num_devices for node in problem.nodes)): 0.0}, 0.0
    for job in problem.jobs:
        price = work_prices.get(job.id, 0.0)
        if price <= 0:
            continue
        earned += price * job_costs.least_of(job, [1 / o.whole_s for o in job.options], problem.switch_cost_s)
        fastest: dict[tuple[int, int], float] = {}
        for option in job.options:
            key = (option.num_nodes, option.slot)
            fastest[key] = min(option.whole_s, fastest.get(key, math.inf))
        after = dict(best)
        for free, worth in best.items():
            for (num_nodes, slot), whole_s in fastest.items():
                for chosen in set(combinations(free, num_nodes)):
                    if min(chosen) >= slot:
                        left = list(free)
                        for size in chosen:
                            left.remove(size)
                        state = tuple(sorted([*left, *(size - slot for size in chosen)]))
                        after[state] = max(after.get(state, 0.0), worth + price / whole_s)
        best = after
    most = max(best.values())
    return earned / most if most else 0.0


def num_states(problem: Problem) -> int:
    """Returns the number of states of free devices on the nodes, where nodes of equal size are interchangeable."""
    sizes = Counter(node.num_devices for node in problem.nodes)
    return math.prod(math.comb(size + count, count) for size, count in sizes.items())


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
    best = pattern_bound(problem)
    if not windows.has_windows(problem) or not 0 < best.seconds < math.inf:
        return best
    model = windows.WindowModel(
        problem, points_s=windows.points_of(problem, before_s=best.seconds), unit_s=best.seconds
    )
    prices = model.prices()
    if prices is None or next(windows.faults_of(prices, problem), None):
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
    chain_s = max(job_costs.earliest_ends_s(problem).values())
    if chain_s > seconds:
        return Bound(chain_s, critical_path(problem), "critical path")
    return Bound(seconds, candidates[best], "dual prices")


def ends_certificate(problem: Problem, weights: Mapping[str, float], bound: Bound) -> Certificate:
    """Returns the certificate of the best lower bound on the sum of weight x end of any plan.

    bound: on the end of the last job.
    """
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
    from ringmaster.tasks.planning.bounds.pattern_model import PatternModel

    unit_s = certified_bound(_simple_certificate(problem), problem)
    if not math.isfinite(unit_s):
        return unit_s, None
    model = PatternModel(problem, unit_s=unit_s, is_integer=True)
    model.solve(work_s=work_s, time_limit_s=time_limit_s)
    return max(0.0, model.bound_s()), model.chosen_options()


def plain_bound_s(problem: Problem) -> float:
    """Returns the best lower bound on any plan that arithmetic finds without prices of a plan."""
    return max(certified_bound(_simple_certificate(problem), problem), *job_costs.earliest_ends_s(problem).values())


def critical_path(problem: Problem) -> Certificate | None:
    """Returns the prices of the longest chain of `after`: 1 a second for its jobs. None for fused problems."""
    if problem.is_fused:
        return None
    starts_s, ends_s = job_costs.earliest_starts_s(problem), job_costs.earliest_ends_s(problem)
    chain = [max(ends_s, key=lambda job: ends_s[job])]
    while after := problem.job(chain[0]).after:
        last = max(after, key=lambda job: ends_s[job])
        if ends_s[last] < starts_s[chain[0]]:  # its release decides, or the devices that all jobs before it need
            break
        chain.insert(0, last)
    own, order = dict.fromkeys(chain, (1.0,)), {job: {before: (1.0,)} for before, job in pairwise(chain)}
    return Certificate(windows=WindowPrices((0.0,), ({},), own, order))


def by_area(problem: Problem) -> Certificate:
    """Returns prices that need no solver: 1 a second for each device, 0 for a job's own time."""
    slots = {option.slot for job in problem.jobs for option in job.options}
    return Certificate({slot: float(slot) for slot in sorted(slots)})


def _simple_certificate(problem: Problem) -> Certificate:
    """Returns the better of two certificates: prices by area, or the whole price on the longest job."""
    shortest = job_costs.shortest_of(problem)
    longest = max(shortest, key=lambda job: shortest[job])
    cover = {longest: 1.0} if problem.is_fused else {}
    by_length = Certificate(job_prices={longest: 1.0}, cover_prices=cover)
    return max(by_area(problem), by_length, key=lambda certificate: certified_bound(certificate, problem))


COUNTING = "counting equal jobs"
"""Name of the proof in plans."""

MAX_UNITS = 100_000  # size limit of the table; beyond it the bound is 0


def counted_bound_s(problem: Problem) -> float:
    """Returns a lower bound in seconds on plans without preemption of equal jobs; 0 where the jobs are not equal."""
    shapes = {
        frozenset((o.num_devices, o.num_nodes, o.device_type, o.host_memory_bytes, o.whole_s) for o in job.options)
        for job in problem.jobs
    }
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


MAX_LOOKED_AT = 1_000  # limit of jobs x deadlines that are checked: half a second
MAX_CHECKED_SUBSETS = 200  # subsets of jobs that are checked to find a small one that conflicts
SAME = 1e-6  # share of a deadline within which a bound proves nothing


def conflicts(problem: Problem) -> Iterator[str]:
    """Yields messages about deadlines that provably no plan can meet, each with the seconds of its proof.

    A single job is infeasible by its release, the jobs that it waits for and its fastest option. Several jobs conflict
    if the lower bound of the jobs due by some time exceeds that time, on nodes with limited availability. The message
    names a small subset that still conflicts. A job that others wait for is due early enough for those.
    """
    if (departure := _departure(problem)) is not None:
        yield departure
        return
    ends = job_costs.earliest_ends_s(problem)
    alone = [job for job in problem.jobs if job.deadline_s is not None and ends[job.id] > job.deadline_s * (1 + SAME)]
    for job in alone:
        yield (
            f"job {job.id}: cannot end before {ends[job.id]:.1f} s by these runtimes, "
            f"its deadline is {job.deadline_s} s: "
            f"{ends[job.id] - (job.deadline_s or 0.0):.1f} s too late"
        )
    if not alone:
        yield from _joint_conflicts(problem)


def unmet(plan: Plan, problem: Problem) -> str:
    """Returns the message for the case where no plan meets all deadlines, but none is proved infeasible."""
    late = []
    for job in problem.jobs:
        own = (s for s in plan.segments if job.id in (s.job, *problem.job(s.job).options[s.option].jobs))
        end_s = max((s.end_s for s in own), default=0.0)
        if job.deadline_s is not None and end_s > job.deadline_s:
            late.append(f"{job.id} ({end_s - job.deadline_s:.1f} s after {job.deadline_s} s)")
    return f"no plan was found that meets all deadlines: the best one ends jobs late: {', '.join(late)}"


def _departure(problem: Problem) -> str | None:
    """Returns a message if it is proved that nodes become unavailable before all work is done, or None."""
    if all(node.available_until_s is None for node in problem.nodes):
        return None
    names = [job.id for job in problem.jobs]
    if math.isfinite(_needed_s(problem, names)):
        return None
    few = _fewer(names, lambda some: math.isinf(_needed_s(problem, some)))
    last_s = max(node.available_until_s or 0.0 for node in problem.nodes)
    needed = sum(costs_of(by_area(problem), problem)[name] for name in few)
    there = sum(node.num_devices * (node.available_until_s or 0.0) for node in problem.nodes)
    missing = f", {needed - there:.1f} more than the nodes give" if needed > there else ""
    return (
        f"jobs {enumerated(few)}: cannot all be done before the nodes go away, the last one at {last_s} s: they take "
        f"at least {needed:.1f} device-seconds{missing}"
    )


def _joint_conflicts(problem: Problem) -> Iterator[str]:
    """Yields the conflicts of the first due time that jobs together exceed, and of the one that they exceed most."""
    due = _due_s(problem)
    times = sorted(set(due.values()))
    step = max(1, -(-len(times) // max(1, MAX_LOOKED_AT // len(problem.jobs))))
    missing: dict[float, float] = {}
    for due_s in sorted({*times[::step], *times[-1:]}):
        missing_s = _needed_s(problem, _due_by(problem, due, due_s)) - due_s
        if missing_s > SAME * due_s:
            missing[due_s] = missing_s
    if missing:
        first_s, worst_s = next(iter(missing)), max(missing, key=lambda due_s: missing[due_s])
        for due_s in dict.fromkeys((first_s, worst_s)):
            yield _joint_conflict(problem, _due_by(problem, due, due_s), due_s, missing[due_s])


def _joint_conflict(problem: Problem, names: Sequence[str], due_s: float, missing_s: float) -> str:
    few = _fewer(names, lambda some: _needed_s(problem, some) > due_s * (1 + SAME))
    few_s = _needed_s(problem, few)
    every = "" if len(few) == len(names) else f"; all {len(names)} jobs due by then miss {missing_s:.1f} s"
    return (
        f"jobs {enumerated(few)}: cannot all end by {due_s} s: together they need at least {few_s:.1f} s, "
        f"{few_s - due_s:.1f} s more{every}"
    )


def _due_by(problem: Problem, due: Mapping[str, float], due_s: float) -> list[str]:
    return [job.id for job in problem.jobs if due.get(job.id, math.inf) <= due_s]


def _due_s(problem: Problem) -> dict[str, float]:
    """Returns when each job must end to meet all deadlines, its own and those of jobs that wait for it."""
    shortest = job_costs.shortest_of(problem)
    due = {job.id: job.deadline_s for job in problem.jobs if job.deadline_s is not None}
    for job in reversed(problem.in_order):
        if job.id in due:
            for other in job.after:
                due[other] = min(due.get(other, math.inf), due[job.id] - shortest[job.id])
    return due


def _needed_s(problem: Problem, names: Collection[str]) -> float:
    """Returns a lower bound in seconds on plans of these jobs alone."""
    some = job_costs.only(problem, set(names))
    undated = tuple(replace(job, deadline_s=None) for job in some.jobs)  # jobs that then are alike share columns
    return pattern_bound(replace(some, jobs=undated)).seconds


def _fewer(names: Sequence[str], is_conflict: Callable[[Sequence[str]], bool]) -> list[str]:
    """Returns a small subset of the names that still conflicts.

    Halves, then quarters and so on are removed as long as the rest conflicts.
    """
    left, size, trials = list(names), len(names) // 2, 0
    while size >= 1:
        start = 0
        while start < len(left) and trials < MAX_CHECKED_SUBSETS:
            trial = left[:start] + left[start + size :]
            trials += 1
            if trial and is_conflict(trial):
                left = trial
            else:
                start += size
        size //= 2
    return left
