"""What an executor tells whoever listens: progress views, the ledger, Prefect artifacts. One thread tells them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.techniques.engine.gang import Outcome


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan was made (the first one, or another because of `why`)."""

    problem: Problem
    plan: Plan
    why: str


@dataclass(frozen=True, kw_only=True)
class SegmentStarted:
    """A gang was started for segment `number` of the journal; `attempt` counts from 1. fellows: whom it trains too."""

    number: int
    segment: PlannedSegment
    technique: str
    num_devices: int
    first_step: int
    attempt: int
    fellows: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GangSaid:
    """An event of a running gang, as rank 0 sent it: ready, steps, metrics, checkpoint, checkpoint_failed."""

    number: int
    job: str
    event: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SegmentEnded:
    """A gang has ended and its devices are free; `decision` says in words what follows."""

    number: int
    segment: PlannedSegment
    outcome: Outcome
    decision: str
    fellows: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """A job is done, or failed for good: `message` says why; `details` hold step, metrics and model folder."""

    job: str
    status: str
    message: str
    details: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Segments that could start wait for devices that other processes of this machine hold; told when it changes."""

    holders: tuple[str, ...]


ExecutionEvent = Planned | SegmentStarted | GangSaid | SegmentEnded | JobEnded | Waiting
Listener = Callable[[ExecutionEvent], None]
