"""Steering of a running batch: requests that set how far jobs may train, and define jobs that were placeholders.

The module `execute` of a feature lists its policies in `STEERING`, and in `STEERED_VALUES` pairs of
further keys of requests and the types of their values, which its `ExecutorHook` applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol

from ringmaster.codec import from_json, to_json
from ringmaster.features import listed
from ringmaster.tasks.execution.execution_events import ExecutionEvent
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.storage.journal import JobRecord, Journal
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.job import TrainingPhase


@dataclass(frozen=True, kw_only=True)
class SteeringRequest:
    """The changes that are requested, by job name.

    jobs: the definitions of placeholder jobs, whose values were unknown before. A job that has begun stays unchanged.
    likes: for each of them, a job of the batch that cannot differ from it in speed or size.
    goals: the new goals. A goal is never lowered.
    stops: the reasons of jobs that are stopped early.
    phases: the phases of jobs that get another batch size or precision from their goal on.
    choices: by job, why it gets another one, or does not.
    of_features: what features request of jobs, by their keys.
    """

    jobs: Mapping[str, Job] = field(default_factory=dict)
    likes: Mapping[str, str] = field(default_factory=dict)
    goals: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, str] = field(default_factory=dict)
    phases: Mapping[str, tuple[TrainingPhase, ...]] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    of_features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.jobs or self.goals or self.stops or self.of_features)

    @property
    def _tables(self) -> dict[str, Mapping[str, Any]]:
        own = {key: each for key, each in vars(self).items() if key != "of_features"}
        return {**own, **self.of_features}

    @property
    def names(self) -> set[str]:
        """The names of all jobs that the request is about."""
        return {name for each in self._tables.values() for name in each}

    def renamed(self, name_of: Callable[[str], str]) -> SteeringRequest:
        """Returns the request with another name of each job; `likes` has the same values."""
        tables = {key: {name_of(name): value for name, value in each.items()} for key, each in self._tables.items()}
        of_features = {key: tables.pop(key) for key in self.of_features}
        return SteeringRequest(**tables, of_features=of_features)

    def to_json(self) -> dict[str, Any]:
        """Returns the request as plain values."""
        return {key: to_json(value) for key, value in self._tables.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SteeringRequest:
        """Returns the request whose `to_json` is `data`. Raises ValueError where it has a wrong shape."""
        kinds = {"jobs": Mapping, "likes": str, "goals": int, "stops": str, "phases": list, "choices": str}
        types = dict[str, Any](listed("execute", "STEERED_VALUES"))
        kinds |= {key: Mapping if is_dataclass(kind) else kind for key, kind in types.items()}
        parts = {key: data.get(key, {}) for key in kinds}
        for key, part in parts.items():
            if not isinstance(part, Mapping) or not all(isinstance(value, kinds[key]) for value in part.values()):
                raise ValueError(f"its {key} are {part!r:.200}")
        jobs = {name: from_json(Job, job) for name, job in parts.pop("jobs").items()}
        phases = {
            name: tuple(from_json(TrainingPhase, row) for row in each) for name, each in parts.pop("phases").items()
        }
        further = {key: {name: from_json(types[key], each) for name, each in parts.pop(key).items()} for key in types}
        if missing := set(jobs) - set(parts["likes"]):
            raise ValueError(f"its fields {', '.join(sorted(missing))} are missing")
        of_features = {key: each for key, each in further.items() if each}
        return cls(jobs=jobs, phases=phases, of_features=of_features, **parts)

    def in_words(self) -> str:
        """Returns the reason for a new plan."""
        parts = list(self.choices.values())
        if goals := {name: goal for name, goal in self.goals.items() if name not in self.choices}:
            parts.append(f"{_names(goals)} may train on")
        if self.stops:
            parts.append(f"{_names(self.stops)} stopped early")
        return "; ".join(parts)


class SteeringPolicy(Protocol):
    """Decides while a batch runs how far its jobs train: the scheduler of a sweep, for example."""

    def attach(
        self,
        act: Callable[[SteeringRequest], None],
        *,
        later: Callable[[Callable[[], None]], None],
        elapsed_s: float,
    ) -> None:
        """Sends requests to `act` from now on, on the thread on which `later` has a function called.

        elapsed_s: the seconds since the batch was first started.
        """

    def listen(self, event: ExecutionEvent) -> None:
        """Handles an event of the executor."""

    def is_open(self) -> bool:
        """Returns whether jobs may get more to train although nothing is left now."""


@dataclass(frozen=True, kw_only=True)
class SteeredBatch:
    """A batch as the policies of features see it.

    jobs: as they were written, with their steps resolved.
    profiles: the options of the jobs and of their variants, by name.
    paths: the folders of the batch's run.
    notice: receives what was chosen, and why.
    is_replayed: whether `listen` gets all events of the batch again after a restart, possibly after their effects are
        already in the journal.
    """

    journal: Journal
    jobs: Sequence[Job]
    profiles: Mapping[str, Sequence[Profile]]
    paths: RunPaths
    notice: Callable[[str], None] = lambda _: None
    is_replayed: bool = False


class FeaturePolicy(SteeringPolicy):
    """Decides how far the jobs of a feature train in a batch."""

    def __init__(self, batch: SteeredBatch) -> None:
        self._batch, self._journal = batch, batch.journal

    @classmethod
    def is_for(cls, job: Job) -> bool:
        """Returns whether the policy steers a job."""
        raise NotImplementedError

    @classmethod
    def goals(cls, jobs: Iterable[Job]) -> Mapping[str, int]:
        """Returns the first goals of the jobs that it steers, by name."""
        raise NotImplementedError


def steering_policy(batch: SteeredBatch) -> FeaturePolicy | None:
    """Returns what steers a batch: the first policy of a feature that is for one of its jobs; None for no such job."""
    return next((kind(batch) for kind in _policies() if any(map(kind.is_for, batch.jobs))), None)


def first_goals(jobs: Sequence[Job], *, known: Mapping[str, JobRecord]) -> dict[str, int]:
    """Returns the first goals of the jobs that a policy of a feature steers, by name.

    known: the records of jobs; those that have a goal already are left out.
    """
    goals = {name: goal for kind in _policies() for name, goal in kind.goals(jobs).items()}
    has_goal = {name for name, record in known.items() if record.goal is not None}
    return {name: goal for name, goal in goals.items() if name not in has_goal}


def _policies() -> Iterator[type[FeaturePolicy]]:
    return listed("execute", "STEERING")


def _names(names: Mapping[str, Any]) -> str:
    listed = list(names)
    return ", ".join(listed) if len(listed) <= 3 else f"{', '.join(listed[:2])} and {len(listed) - 2} others"
