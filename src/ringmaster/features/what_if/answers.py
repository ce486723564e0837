"""Answers in sentences, with durations in readable units, and as JSON objects, in seconds under keys in `_s`."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from ringmaster.codec import to_json
from ringmaster.errors import ProblemError
from ringmaster.features.what_if import gains
from ringmaster.tasks.planning.bounds.bounds import costs_of, preemptive_bound
from ringmaster.tasks.planning.bounds.job_costs import earliest_ends_s
from ringmaster.tasks.planning.bounds.windows import Rate, costs_of_jobs, rates_of_jobs, rates_of_nodes
from ringmaster.tasks.planning.durations import counted, seconds_text
from ringmaster.tasks.planning.objectives import MAKESPAN
from ringmaster.tasks.planning.plans.plan import Certificate, Plan, WindowPrices
from ringmaster.tasks.planning.problem_changes import ProblemChange
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import MAX_DEVICES, PlanningNode
from ringmaster.text import enumerated

MAX_EXPLAINED = 10  # whose costs are explained
MIN_OF_BOUND = 1e-6  # of the bound, of a job that binds by its own length


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
    gain: gains.Gain
    members: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the nodes and the jobs contribute.

    nodes: by kind.
    own_time: jobs that bind by their own length, which no further device shortens, with their share of the bound; in
        descending order.
    jobs: the jobs that cost most, in descending order.
    quotas: by user, the devices of the quota, its share of the bound, and what one more device gains at most, by the
        prices alone.
    """

    nodes: tuple[NodePrice, ...]
    own_time: tuple[tuple[str, float], ...]
    jobs: tuple[JobCost, ...]
    quotas: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)


def explain(what_if: gains.WhatIf, *, most_jobs: int = MAX_EXPLAINED) -> Explanation:
    """Returns the contributions of all nodes, and the costs of the jobs that cost most."""
    problem = what_if.problem
    prices = _as_windows(what_if.certificate, problem)
    worth: dict[PlanningNode, float] = defaultdict(float)
    own: dict[str, float] = defaultdict(float)
    for node, rate in rates_of_nodes(prices, problem):
        worth[_kind_of_nodes(node)] += _earned(rate, until_s=what_if.bound_s)
    for job, rate in rates_of_jobs(prices, problem):
        own[job] += _earned(rate, until_s=what_if.bound_s)
    of_quotas = {
        user: what_if.certificate.quota_prices.get(user, 0.0) * most * what_if.bound_s
        for user, most in problem.limits.items()
    }
    total = math.fsum([*worth.values(), *own.values(), *of_quotas.values()]) or 1.0
    first = {_kind_of_nodes(node): node for node in reversed(problem.nodes)}
    nodes = tuple(
        NodePrice(
            node=first[kind],
            num_nodes=count,
            share=worth[kind] / total,
            one_more_s=_gain_by_prices_s(
                what_if,
                gains.MoreDevices(num_devices=1, device_type=kind.device_type).on(problem, node=first[kind].id),
            ),
        )
        for kind, count in Counter(map(_kind_of_nodes, problem.nodes)).items()
    )
    binding = ((job, earned / total) for job, earned in own.items() if earned > MIN_OF_BOUND * total)
    own_time = tuple(sorted(binding, key=lambda pair: -pair[1]))
    quotas = {
        user: (
            most,
            of_quotas[user] / total,
            _gain_by_prices_s(what_if, replace(problem, quotas={**problem.quotas, user: most + 1})),
        )
        for user, most in problem.limits.items()
    }
    return Explanation(nodes=nodes, own_time=own_time, jobs=costliest(what_if, most_jobs), quotas=quotas)


def costliest(what_if: gains.WhatIf, most: int, *, solves_bound: bool = True) -> tuple[JobCost, ...]:
    """Returns the jobs whose work is worth most at the prices, with what leaving them out gains, in that order.

    A job that others wait for is left out with them. A job without which none is left is omitted.

    solves_bound: as for `WhatIf.gain`.
    """
    problem, certificate = what_if.problem, what_if.certificate
    worth = costs_of_jobs(certificate.windows, problem) if certificate.windows else costs_of(certificate, problem)
    with_dependents = {job.id: (job.id, *gains.dependents(problem, (job.id,))) for job in problem.jobs}
    sums = {
        job: sum(worth[name] for name in names) for job, names in with_dependents.items() if len(names) < len(worth)
    }
    first = heapq.nlargest(most, sums, key=lambda job: sums[job])
    costs = [
        JobCost(
            job=job,
            gain=what_if.gain(gains.FewerJobs(jobs=with_dependents[job]), solves_bound=solves_bound),
            members=tuple(member for name in with_dependents[job] for member in problem.job(name).members),
        )
        for job in first
    ]
    return tuple(sorted(costs, key=lambda cost: -cost.gain.most_s))


def _as_windows(certificate: Certificate, problem: Problem) -> WindowPrices:
    if certificate.windows:
        return certificate.windows
    slots = {kind: certificate.prices_of(kind) for kind in problem.device_types}
    return WindowPrices((0.0,), (slots,), {job: (price,) for job, price in certificate.job_prices.items()})


def _kind_of_nodes(node: PlanningNode) -> PlanningNode:
    return replace(node, id="")


def _earned(rate: Rate, *, until_s: float) -> float:
    return rate.worth * max(0.0, min(rate.end_s, until_s) - rate.start_s)


def _gain_by_prices_s(what_if: gains.WhatIf, changed: Problem) -> float:
    """Returns what a change of the problem gains at most, by the prices alone."""
    return max(0.0, what_if.makespan_s - what_if.bound_by_prices_s(changed))


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

    question: gains.Deadline
    verdict: DeadlineVerdict
    makespan_s: float
    bound_s: float
    longest_job: str = ""
    longest_job_s: float = 0.0
    unit: gains.MoreDevices | gains.MoreNodes | None = None
    too_few: int = 0
    enough: int | None = None


def answer_deadline(
    what_if: gains.WhatIf, question: gains.Deadline, search: Callable[[gains.Gain], gains.Gain] | None = None
) -> DeadlineAnswer:
    """Returns whether all jobs can end in time.

    Where the plan is late, more devices of the commonest kind are considered: on the node if there is only one, else as
    further nodes.

    search: plans with more devices, beyond quick ones, such as `what_if.planned`; None for no search.
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
    most = MAX_MORE
    if isinstance(unit, gains.MoreDevices):
        most = min(MAX_MORE, MAX_DEVICES - what_if.problem.nodes[0].num_devices)
    too_few = _too_few(what_if, unit, due_s, most=most) if known.verdict is DeadlineVerdict.NO else 0
    enough = None
    if too_few < most:
        enough = _enough(what_if, unit, due_s, range(too_few, most + 1), search)
    return replace(known, unit=unit, too_few=too_few, enough=enough)


def unit_of(problem: Problem) -> gains.MoreDevices | gains.MoreNodes:
    """Returns one more device where there is one node, else one more node of the commonest type and size."""
    if len(problem.nodes) == 1:
        return gains.MoreDevices(num_devices=1, device_type=problem.nodes[0].device_type)
    kinds = Counter((node.device_type, node.num_devices) for node in problem.nodes)
    (kind, size), _ = kinds.most_common(1)[0]
    return gains.MoreNodes(num_devices=size, device_type=kind)


def times(unit: gains.MoreDevices | gains.MoreNodes, count: int) -> gains.MoreDevices | gains.MoreNodes:
    """Returns `count` times as many devices or nodes."""
    return (
        replace(unit, num_nodes=count * unit.num_nodes)
        if isinstance(unit, gains.MoreNodes)
        else replace(unit, num_devices=count * unit.num_devices)
    )


def _too_few(what_if: gains.WhatIf, unit: gains.MoreDevices | gains.MoreNodes, due_s: float, *, most: int) -> int:
    """Returns the largest number of further devices or nodes with which the bound excludes an end in time."""

    def is_excluded(count: int) -> bool:
        problem = times(unit, count).on(what_if.problem)
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
    what_if: gains.WhatIf,
    unit: gains.MoreDevices | gains.MoreNodes,
    due_s: float,
    counts: range,
    search: Callable[[gains.Gain], gains.Gain] | None,
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


MIN_MAKESPAN_S = 300.0  # shorter batches are over before more devices could come, and their gains are noise
MAX_JOBS = 3  # whose costs a report shows
MAX_GAP = 0.05  # of the plan above its bound, as a share of the makespan
MIN_SHARE = 0.005  # of the bound, of a job that an explanation names; less would be read as 0 %
MIN_COST = 0.005  # of a job that a report names, as a share of the makespan


def section(plan: Plan, problem: Problem, *, device: str = "") -> list[str]:
    """Returns what more devices would gain, and which jobs cost most, in sentences: at most a second of work.

    Returns no sentence where it would not help: for another objective than the makespan, for short batches, for a plan
    that misses deadlines, and for one so far above its bound that little is proved.

    device: the kind of the devices, where the nodes have no types.
    """
    if plan.objective != MAKESPAN.name or plan.makespan_s < MIN_MAKESPAN_S or len(problem.jobs) < 2:
        return []
    try:
        what_if = gains.WhatIf(problem, plan)
    except ProblemError:  # a batch that runs may miss deadlines
        return []
    if what_if.makespan_s - what_if.bound_s > MAX_GAP * what_if.makespan_s:
        return []
    unit = unit_of(problem)
    changes: list[ProblemChange] = [gains.MoreDevices(num_devices=1, device_type=unit.device_type)]
    changes += [unit] if isinstance(unit, gains.MoreNodes) else []
    # A bound by windows takes tenths of a second, and there is no quick plan for such problems anyway.
    renewed = what_if.certificate.windows is None
    proof = proof_text(are_measured=None)
    lines = [
        f"With {gain.change.in_words(node=gain.on, device=device)} the last job would end {_between(gain)} earlier, "
        f"{proof}."
        for gain in (what_if.gain(change, solves_bound=renewed) for change in changes)
    ]
    return lines + [
        f"Without {_job_and_waiting(cost)} the last job would end {_between(cost.gain)} earlier."
        for cost in costliest(what_if, MAX_JOBS, solves_bound=renewed)
        if cost.gain.most_s >= MIN_COST * plan.makespan_s
    ]


def proof_text(*, are_measured: bool | None) -> str:
    """Returns of what a proof holds, for the end of a sentence: it is as good as the runtimes of the problem.

    are_measured: whether all of them were measured, not predicted; None where that is unknown.
    """
    if are_measured:
        return "by these measured runtimes"
    return "by these runtimes" if are_measured is None else "by these predicted runtimes"


def gain_lines(gain: gains.Gain, what_if: gains.WhatIf, *, proof: str) -> Iterator[str]:
    """Yields the answer about a change: the proved interval or, once it is known, what planning again gave.

    proof: from `proof_text`.
    """
    if gain.planned_s is None:
        yield f"With {gain.change.in_words(node=gain.on)}: the best plan ends {_between(gain)} earlier, {proof}."
        for each in gain.users:
            then = f"No plan then ends the jobs of {each.user} before {seconds_text(each.bound_s)}"
            yield f"{then}; {_compared(each.bound_s, each.before_s, at_least=True)}."
        return
    assert gain.makespan_s is not None
    old_s = what_if.makespan_s
    yield (
        f"Planned again: it ends after {seconds_text(gain.makespan_s, like=old_s)} instead of {seconds_text(old_s)}, "
        f"{seconds_text(gain.planned_s)} earlier; the best plan {_between(gain)}, {proof}."
    )
    for each in gain.users:
        if each.planned_s is not None:
            then = f"The jobs of {each.user} then end after {seconds_text(each.planned_s)}"
            yield f"{then}, {_compared(each.planned_s, each.before_s)}."


def _compared(then_s: float, before_s: float, *, at_least: bool = False) -> str:
    """Returns a time relative to that of the plan: "12 min later than by the plan"."""
    if then_s > before_s * (1 + SAME):
        return f"{'at least ' if at_least else ''}{seconds_text(then_s - before_s)} later than by the plan"
    if at_least:
        return f"by the plan after {seconds_text(before_s)}"
    earlier_s = before_s - then_s
    return f"{seconds_text(earlier_s)} earlier than by the plan" if earlier_s > SAME * before_s else "as by the plan"


def deadline_lines(answer: DeadlineAnswer, *, proof: str) -> Iterator[str]:
    """Yields whether all jobs can end in time, and what would suffice. proof: from `proof_text`."""
    due = seconds_text(answer.question.due_s)
    if answer.verdict is DeadlineVerdict.YES:
        yield f"All jobs can end within {due}: the plan ends after {seconds_text(answer.makespan_s)}."
        return
    if answer.longest_job:
        yield (
            f"No number of devices lets all jobs end within {due}: "
            f"{answer.longest_job} cannot end before {seconds_text(answer.longest_job_s)}, {proof}."
        )
        return
    if answer.verdict is DeadlineVerdict.NO:
        yield f"No plan lets all jobs end within {due}: none ends before {seconds_text(answer.bound_s)}, {proof}."
    else:
        yield (
            f"It is not known whether all jobs can end within {due}: the plan ends after "
            f"{seconds_text(answer.makespan_s)}, and no plan ends before {seconds_text(answer.bound_s)}, {proof}."
        )
    if answer.unit is None:
        return
    if answer.too_few:
        yield f"Even with {times(answer.unit, answer.too_few).in_words()} it is impossible {proof}."
    if answer.enough is not None:
        yield f"With {times(answer.unit, answer.enough).in_words()} it is possible {proof}: there is a plan."
    else:
        yield "No number of further devices was found that suffices."


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """Yields what the nodes and the jobs contribute to the bound."""
    for price in explanation.nodes:
        kind = gains.type_text(price.node.device_type)
        until = price.node.available_until_s
        nodes = "the node" if price.num_nodes == 1 else f"the {price.num_nodes} nodes"
        names = price.node.id if price.num_nodes == 1 else f"like {price.node.id}"
        left = "" if until is None else f", which go away after {seconds_text(until)},"
        yield (
            f"{price.share:.0%} of the bound is due to {nodes} {names} ({counted(price.node.num_devices, 'device')}"
            f"{kind}){left}: one more device there gains at most {seconds_text(price.one_more_s)}."
        )
    for user, (most, share, one_more_s) in explanation.quotas.items():
        yield (
            f"{share:.0%} of the bound is due to the quota of {user} ({counted(most, 'device')}): one more gains at "
            f"most {seconds_text(one_more_s)}."
        )
    for job, share in explanation.own_time:
        if share >= MIN_SHARE:
            yield f"{share:.0%} of the bound is due to the length of {job} itself, which no further device shortens."
    yield from (f"{_job_and_waiting(cost)} costs {_between(cost.gain)}." for cost in explanation.jobs)


def _job_and_waiting(cost: JobCost) -> str:
    assert isinstance(cost.gain.change, gains.FewerJobs)
    waiting = cost.gain.change.jobs[1:]
    parts = [cost.job]
    if waiting:
        parts.append(f"with {enumerated(waiting, most=5)} that {'waits' if len(waiting) == 1 else 'wait'} for it")
    if cost.members:
        parts.append(f"with {enumerated(cost.members, most=5)} trained together with {'them' if waiting else 'it'}")
    return ", ".join(parts)


def _between(gain: gains.Gain) -> str:
    if gain.least_s <= 0:
        return f"at most {seconds_text(gain.most_s)}"
    least, most = seconds_text(gain.least_s, like=gain.most_s), seconds_text(gain.most_s)
    return least if least == most else f"{least.split()[0]} to {most}"


def question_json(question: ProblemChange | gains.Deadline) -> dict[str, Any]:
    """Returns a question under the name of its option."""
    return {"question": question.option, **to_json(question)}


def gain_json(gain: gains.Gain) -> dict[str, Any]:
    """Returns the interval and what planning again gave."""
    return {
        **question_json(gain.change),
        **({"node": gain.on} if gain.on else {}),
        "gain_least_s": gain.least_s,
        "gain_most_s": gain.most_s,
        "gain_most_by_prices_s": gain.most_by_prices_s,
        "gain_planned_s": gain.planned_s,
        "lower_bound_s": gain.bound_s,
        "makespan_s": gain.makespan_s,
        **({"users": [asdict(each) for each in gain.users]} if gain.users else {}),
    }


def deadline_json(answer: DeadlineAnswer) -> dict[str, Any]:
    """Returns the verdict and what would suffice."""
    return {
        **question_json(answer.question),
        "verdict": str(answer.verdict),
        "makespan_s": answer.makespan_s,
        "lower_bound_s": answer.bound_s,
        "longest_job": answer.longest_job or None,
        "unit": None if answer.unit is None else question_json(answer.unit),
        "too_few": answer.too_few,
        "enough": answer.enough,
    }


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """Returns the contributions of nodes and jobs."""
    return {
        "nodes": [
            {
                "node": price.node.id,
                "num_nodes": price.num_nodes,
                "num_devices": price.node.num_devices,
                "device_type": price.node.device_type,
                "share": price.share,
                "one_more_gains_most_s": price.one_more_s,
            }
            for price in explanation.nodes
        ],
        "own_time": dict(explanation.own_time),
        "quotas": {
            user: {"num_devices": most, "share": share, "one_more_gains_most_s": one_more_s}
            for user, (most, share, one_more_s) in explanation.quotas.items()
        },
        "jobs": [{"job": cost.job, **gain_json(cost.gain)} for cost in explanation.jobs],
    }


def answer_questions(
    what_if: gains.WhatIf,
    changes: Iterable[ProblemChange],
    deadlines: Iterable[gains.Deadline],
    *,
    is_explained: bool,
    are_measured: bool | None,
    limits: Mapping[str, Any] | None,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Answers what changes gain, and whether all jobs can end in time; prints each sentence as soon as it is known.

    is_explained: whether to print which nodes and jobs decide when the last job ends.
    are_measured: whether all runtimes of the problem were measured; None where that is not known.
    limits: of each search for a new plan; None for no search.

    Returns what `whatif --json` prints.
    """

    def say_all(lines: Iterable[str]) -> None:
        for line in lines:
            say(line)

    end, bound = seconds_text(what_if.makespan_s), seconds_text(what_if.bound_s)
    proof = proof_text(are_measured=are_measured)
    say(f"The plan ends after {end}; no plan ends before {bound}, {proof}.")
    answers = []
    for change in changes:
        gain = what_if.gain(change)
        say_all(gain_lines(gain, what_if, proof=proof))
        if limits is not None:
            gain = what_if.planned(gain, **limits)
            say_all(gain_lines(gain, what_if, proof=proof))
        answers.append(gain_json(gain))
    for deadline in deadlines:
        answer = answer_deadline(what_if, deadline, None if limits is None else partial(what_if.planned, **limits))
        say_all(deadline_lines(answer, proof=proof))
        answers.append(deadline_json(answer))
    result = {"makespan_s": what_if.makespan_s, "lower_bound_s": what_if.bound_s, "answers": answers}
    if is_explained:
        explanation = explain(what_if)
        say_all(explanation_lines(explanation))
        result["explanation"] = explanation_json(explanation)
    return result
