"""Steering of a running batch: requests that set how far jobs may train and define jobs that were placeholders.

A job's *goal* is the step up to which it is planned. A job that has reached its goal rests and holds no devices, until
its goal is raised or it is stopped early. A stop is no failure: the last checkpoint and metrics stay. The job's record
in the journal holds all of this, so that another executor that takes over finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.execution.events import ExecutionEvent
from ringmaster.techniques import Job

GOAL, RESTED, EVALUATED = "goal", "rested", "evaluated"
SETTLED, LIKE = "job", "like"
"""Keys of a job's details.

GOAL: its goal. RESTED: the goal that it has reached. EVALUATED: the step and metrics of its last evaluation, stored for
jobs that have a goal. SETTLED: the job that its placeholder became. LIKE: the job of the same shape whose data and
profiles it uses.
"""


@dataclass(frozen=True, kw_only=True)
class SteeringRequest:
    """The changes that are requested, by job name.

    jobs: the definitions of placeholder jobs, whose values were unknown before. A job that has begun stays unchanged.
    likes: for each of them, a job of the batch that cannot differ from it in speed or size.
    goals: the new goals. A goal is never lowered.
    stops: the reasons of jobs that are stopped early.
    """

    jobs: Mapping[str, Job] = field(default_factory=dict)
    likes: Mapping[str, str] = field(default_factory=dict)
    goals: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.jobs or self.goals or self.stops)

    def to_json(self) -> dict[str, Any]:
        """Returns the request as plain values."""
        jobs = {name: to_json(job) for name, job in self.jobs.items()}
        return {"jobs": jobs, "likes": dict(self.likes), "goals": dict(self.goals), "stops": dict(self.stops)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SteeringRequest:
        """Returns the request whose `to_json` is `data`. Raises ValueError where it has a wrong shape."""
        parts = {key: data.get(key, {}) for key in ("jobs", "likes", "goals", "stops")}
        kinds = {"jobs": Mapping, "likes": str, "goals": int, "stops": str}
        for key, part in parts.items():
            if not isinstance(part, Mapping) or not all(isinstance(value, kinds[key]) for value in part.values()):
                raise ValueError(f"its {key} are {part!r:.200}")
        jobs = {name: from_json(Job, job) for name, job in parts.pop("jobs").items()}
        if missing := set(jobs) - set(parts["likes"]):
            raise ValueError(f"it does not say what {', '.join(sorted(missing))} is like")
        return cls(jobs=jobs, **parts)

    def in_words(self) -> str:
        """Returns the reason for a new plan."""
        said = []
        if self.goals:
            said.append(f"{_names(self.goals)} may train on")
        if self.stops:
            said.append(f"{_names(self.stops)} stopped early")
        return "; ".join(said)


class SteeringPolicy(Protocol):
    """Decides while a batch runs how far its jobs train: the scheduler of a sweep, for example."""

    def attach(
        self,
        act: Callable[[SteeringRequest], None],
        *,
        later: Callable[[Callable[[], None]], None],
        started_s: float,
    ) -> None:
        """Sends requests to `act` from now on, on the thread on which `later` has a function called.

        started_s: when the batch was first started, in seconds since the epoch.
        """

    def listen(self, event: ExecutionEvent) -> None:
        """Handles an event of the executor."""

    def is_open(self) -> bool:
        """Returns whether jobs may get more to train although nothing is left now."""


def _names(names: Mapping[str, Any]) -> str:
    listed = list(names)
    return ", ".join(listed) if len(listed) <= 3 else f"{', '.join(listed[:2])} and {len(listed) - 2} others"
