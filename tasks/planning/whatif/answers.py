"""Answers in sentences, with seconds as people read them, and as JSON objects, in seconds under keys in `_s`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.gantt import counted, seconds_text
from ringmaster.tasks.planning.objectives import MAKESPAN
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.whatif.deadlines import (
    DeadlineAnswer,
    DeadlineVerdict,
    Explanation,
    JobCost,
    costliest,
    times,
    unit_of,
)
from ringmaster.tasks.planning.whatif.gains import Change, Deadline, FewerJobs, Gain, MoreDevices, MoreNodes, WhatIf

TITLE = "What more devices would gain"
LEAST_MAKESPAN_S = 300.0  # shorter batches are over before more devices could come, and their gains are noise
MOST_JOBS = 3  # whose costs a report shows
MOST_GAP = 0.05  # of the plan above its bound, as a share of the makespan
LEAST_SHARE = 0.005  # of the bound, of a job that an explanation names; less would be read as 0 %
LEAST_COST = 0.005  # of a job that a report names, as a share of the makespan


def section(plan: Plan, problem: Problem, *, device: str = "") -> list[str]:
    """Returns what more devices would gain, and which jobs cost most, in sentences: at most a second of work.

    Returns no sentence where it would not help: for another objective than the makespan, for short batches, for a plan
    that misses deadlines, and for one so far above its bound that nothing is certain.

    device: the kind of the devices, where the nodes have no types.
    """
    if plan.objective != MAKESPAN.name or plan.makespan_s < LEAST_MAKESPAN_S or len(problem.jobs) < 2:
        return []
    try:
        what_if = WhatIf(problem, plan)
    except ProblemError:  # a batch that runs may miss deadlines
        return []
    if what_if.makespan_s - what_if.bound_s > MOST_GAP * what_if.makespan_s:
        return []
    unit = unit_of(problem)
    changes: list[Change] = [MoreDevices(num_devices=1, device_type=unit.device_type)]
    changes += [unit] if isinstance(unit, MoreNodes) else []
    # A bound by windows takes tenths of a second, and there is no quick plan for such problems anyway.
    anew = what_if.certificate.windows is None
    gains = [what_if.gain(change, anew=anew) for change in changes]
    lines = [
        f"With {change_text(gain, device=device)} the last job would end {_between(gain)} earlier." for gain in gains
    ]
    costs = [
        cost for cost in costliest(what_if, MOST_JOBS, anew=anew) if cost.gain.most_s >= LEAST_COST * plan.makespan_s
    ]
    return lines + [
        f"Without {_job_and_waiting(cost)} the last job would end {_between(cost.gain)} earlier." for cost in costs
    ]


def change_text(gain: Gain, *, device: str = "") -> str:
    """Returns what is changed, such as "one more device on n0"."""
    match gain.change:
        case MoreDevices(num_devices=num, device_type=kind):
            return f"{_more(num, 'device')}{_kind(kind, device)} on {gain.on}"
        case MoreNodes(num_devices=num, device_type=kind, num_nodes=num_nodes):
            return f"{_more(num_nodes, 'node')} of {counted(num, 'device')}{_kind(kind, device)}"
        case FewerJobs(jobs=jobs):
            return f"{', '.join(jobs)} left out"


def gain_lines(gain: Gain, what_if: WhatIf) -> Iterator[str]:
    """Yields the answer about a change: the certain interval or, once it is known, what planning anew gave."""
    if gain.planned_s is None:
        yield f"With {change_text(gain)}: the best plan ends {_between(gain)} earlier, for certain."
        return
    assert gain.makespan_s is not None
    old_s = what_if.makespan_s
    yield (
        f"Planned anew: it ends after {seconds_text(gain.makespan_s, like=old_s)} instead of {seconds_text(old_s)}, "
        f"{seconds_text(gain.planned_s)} earlier; the best plan {_between(gain)}, for certain."
    )


def deadline_lines(answer: DeadlineAnswer) -> Iterator[str]:
    """Yields whether all jobs can end in time, and what would suffice."""
    due = seconds_text(answer.question.due_s)
    if answer.verdict is DeadlineVerdict.YES:
        yield f"All jobs can end within {due}: the plan ends after {seconds_text(answer.makespan_s)}."
        return
    if answer.longest_job:
        yield (
            f"No number of devices lets all jobs end within {due}: "
            f"{answer.longest_job} cannot end before {seconds_text(answer.longest_job_s)}."
        )
        return
    if answer.verdict is DeadlineVerdict.NO:
        yield f"No plan lets all jobs end within {due}: none ends before {seconds_text(answer.bound_s)}."
    else:
        yield (
            f"It is not known whether all jobs can end within {due}: the plan ends after "
            f"{seconds_text(answer.makespan_s)}, and no plan ends before {seconds_text(answer.bound_s)}."
        )
    if answer.unit is None:
        return
    if answer.too_few:
        yield f"Even with {_more_of(answer.unit, answer.too_few)} it is certainly impossible."
    if answer.enough is not None:
        yield f"With {_more_of(answer.unit, answer.enough)} it is certainly possible: there is a plan."
    else:
        yield "No number of further devices was found that suffices."


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """Yields what the nodes and the jobs contribute to the bound."""
    for price in explanation.nodes:
        kind = _kind(price.node.device_type)
        until = price.node.available_until_s
        nodes = "the node" if price.num_nodes == 1 else f"the {price.num_nodes} nodes"
        names = price.node.id if price.num_nodes == 1 else f"like {price.node.id}"
        left = "" if until is None else f", which go away after {seconds_text(until)},"
        yield (
            f"{price.share:.0%} of the bound is due to {nodes} {names} ({counted(price.node.num_devices, 'device')}"
            f"{kind}){left}: one more device there gains at most {seconds_text(price.one_more_s)}."
        )
    for job, share in explanation.own_time:
        if share >= LEAST_SHARE:
            yield f"{share:.0%} of the bound is due to the length of {job} itself, which no further device shortens."
    yield from (f"{cost_text(cost)}." for cost in explanation.jobs)


def cost_text(cost: JobCost) -> str:
    """Returns what a job costs, with the jobs that wait for it."""
    return f"{_job_and_waiting(cost)} costs {_between(cost.gain)}"


def _job_and_waiting(cost: JobCost) -> str:
    assert isinstance(cost.gain.change, FewerJobs)
    waiting = cost.gain.change.jobs[1:]
    parts = [cost.job]
    if waiting:
        parts.append(f"with {_listed(waiting)} that {'waits' if len(waiting) == 1 else 'wait'} for it")
    if cost.members:
        parts.append(f"with {_listed(cost.members)} trained together with {'them' if waiting else 'it'}")
    return ", ".join(parts)


def _between(gain: Gain) -> str:
    if gain.least_s <= 0:
        return f"at most {seconds_text(gain.most_s)}"
    least, most = seconds_text(gain.least_s, like=gain.most_s), seconds_text(gain.most_s)
    return least if least == most else f"{least.split()[0]} to {most}"


def _more_of(unit: MoreDevices | MoreNodes, count: int) -> str:
    match times(unit, count):
        case MoreDevices(num_devices=num, device_type=kind):
            return _more(num, "device") + _kind(kind)
        case MoreNodes(num_devices=num, device_type=kind, num_nodes=num_nodes):
            return f"{_more(num_nodes, 'node')} of {counted(num, 'device')}{_kind(kind)}"


def _kind(device_type: str, device: str = "") -> str:
    if device_type:
        return f" of type {device_type}"
    return f" ({device})" if device else ""


def _more(number: int, what: str) -> str:
    return f"one more {what}" if number == 1 else f"{number} more {what}s"


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def question_json(question: Change | Deadline) -> dict[str, Any]:
    """Returns a question under the name of its option."""
    match question:
        case MoreDevices():
            return {"question": "add_devices", **asdict(question)}
        case MoreNodes():
            return {"question": "add_node", **asdict(question)}
        case FewerJobs():
            return {"question": "without", "jobs": list(question.jobs)}
        case Deadline():
            return {"question": "deadline", "due_s": question.due_s}


def gain_json(gain: Gain) -> dict[str, Any]:
    """Returns the interval and what planning anew gave."""
    return {
        **question_json(gain.change),
        **({"node": gain.on} if gain.on else {}),
        "gain_least_s": gain.least_s,
        "gain_most_s": gain.most_s,
        "gain_most_by_prices_s": gain.most_by_prices_s,
        "gain_planned_s": gain.planned_s,
        "lower_bound_s": gain.bound_s,
        "makespan_s": gain.makespan_s,
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
        "jobs": [{"job": cost.job, **gain_json(cost.gain)} for cost in explanation.jobs],
    }
