"""Answers as JSON objects; all times are in seconds, in keys that end in `_s`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ringmaster.tasks.planning.whatif.deadlines import DeadlineAnswer
from ringmaster.tasks.planning.whatif.explanation import Explanation
from ringmaster.tasks.planning.whatif.gains import Gain
from ringmaster.tasks.planning.whatif.questions import Change, Deadline, MoreDevices, MoreNodes, Without


def question_json(question: Change | Deadline) -> dict[str, Any]:
    """Returns a question under the name of its option."""
    match question:
        case MoreDevices():
            return {"question": "add_devices", **asdict(question)}
        case MoreNodes():
            return {"question": "add_node", **asdict(question)}
        case Without():
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
