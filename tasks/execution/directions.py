"""What whoever steers a batch asks of its executor while it runs: how far jobs may train, and what later ones are.

A job's *goal* is the step up to which it is planned. Having come there it rests, its devices free, until its goal is
raised or it is stopped early, which is no failure: its last checkpoint and metrics stay. All of it stands in the job's
record in the journal, so that whoever takes over finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringmaster.techniques import Job
from ringmaster.techniques.values import from_json, to_json

GOAL, RESTED, EVALUATED = "goal", "rested", "evaluated"
SETTLED, LIKE = "job", "like"
"""Keys of a job's details: its goal; the goal that it has come to; the step and metrics of its last evaluation, which
are kept of jobs that have a goal; the job that its place was kept for; and the job of the same shape, whose data and
profiles are its own."""


@dataclass(frozen=True, kw_only=True)
class Directions:
    """What is asked for, by job name.

    jobs: what jobs are whose place was kept, as none of their values was known; one that has begun stays as it is.
    likes: for each of them a job of the batch that cannot differ from it in speed or size.
    goals: a goal is never lowered. stops: why jobs are stopped early.
    """

    jobs: Mapping[str, Job] = field(default_factory=dict)
    likes: Mapping[str, str] = field(default_factory=dict)
    goals: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.jobs or self.goals or self.stops)

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        jobs = {name: to_json(job) for name, job in self.jobs.items()}
        return {"jobs": jobs, "likes": dict(self.likes), "goals": dict(self.goals), "stops": dict(self.stops)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Directions:
        """The directions whose `to_json` is `data`."""
        jobs = {name: from_json(Job, job) for name, job in data.get("jobs", {}).items()}
        return cls(jobs=jobs, **{key: data.get(key, {}) for key in ("likes", "goals", "stops")})

    def in_words(self) -> str:
        """The reason for a new plan."""
        said = []
        if self.goals:
            said.append(f"{_names(self.goals)} may train on")
        if self.stops:
            said.append(f"{_names(self.stops)} stopped early")
        return "; ".join(said)


def _names(names: Mapping[str, Any]) -> str:
    listed = list(names)
    return ", ".join(listed) if len(listed) <= 3 else f"{', '.join(listed[:2])} and {len(listed) - 2} others"
