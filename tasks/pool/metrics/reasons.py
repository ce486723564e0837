"""The kinds of reasons for new plans: their texts name jobs and nodes, of which a metric may not have a series each."""

from __future__ import annotations

import re
from enum import StrEnum


class PlanReason(StrEnum):
    """Why a plan was made."""

    START = "start"
    NEW_JOBS = "new_jobs"
    DEVICES = "devices"
    FAILURE = "failure"
    DEADLINE = "deadline"
    FORECAST = "forecast"
    CLOCK = "clock"
    REQUEST = "request"
    GROUP = "group"
    STEERING = "steering"
    OTHER = "other"


# The first that matches counts, as a plan may have several reasons at once. Job and node names come before or after
# these words, and may contain them.
_PATTERNS = (
    (PlanReason.START, r"(start|resumed|an executor began)$"),
    (PlanReason.NEW_JOBS, r"batch .+ has \d+ jobs$"),
    (PlanReason.DEVICES, r"node .+ (is gone|came)\b|the health of devices has changed|.* has lost its devices"),
    (PlanReason.FAILURE, r".* ran out of memory|the gang of .* crashed|jobs have failed$"),
    (PlanReason.DEADLINE, r"in danger of missing their deadlines"),
    (PlanReason.CLOCK, r"the clock$"),
    (PlanReason.FORECAST, r".* is (late|early) by \d+ s"),
    (PlanReason.REQUEST, r"jobs were (cancelled|paused|resumed|retried)|the priorities of batch"),
    (PlanReason.GROUP, r".* continues? alone"),
    (PlanReason.STEERING, r".* (may train on|stopped early)$|.* stays on .*, under which it started"),
)


def reason_of(why: str) -> PlanReason:
    """Returns the kind of the reason of a plan. why: the text that was stored with the plan."""
    for kind, pattern in _PATTERNS:
        if any(re.match(pattern, part) for part in why.split("; ")):
            return kind
    return PlanReason.OTHER
