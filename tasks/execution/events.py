"""The events that an executor reports to its listeners: progress views, the MLflow recorder, Prefect artifacts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringmaster.codec import SINCE_LATER, stored_as
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.prediction import Prediction
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.storage.database import DatabaseClosed
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.events import Event
from ringmaster.techniques.processes.gang import Outcome
from ringmaster.text import printable_lines

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan was made, the first one or another. `why` gives the reason."""

    problem: Problem
    plan: Plan
    why: str


@dataclass(frozen=True, kw_only=True)
class SegmentStarted:
    """A gang was started.

    number: the segment's number in the journal.
    attempt: counts from 1.
    members: the other jobs that the gang trains.
    num_steps: the steps of the job and of each member, from their first to their last; empty where unknown.
    predicted_bytes: the memory that a device is predicted to need; None where unknown.
    """

    number: int
    segment: PlannedSegment
    technique: str
    num_devices: int
    first_step: int
    attempt: int
    members: tuple[str, ...] = stored_as("fellows", default=())
    num_steps: tuple[int, ...] = field(default=(), metadata=SINCE_LATER)
    predicted_bytes: int | None = field(default=None, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class GangSaid:
    """An event of a running gang, as rank 0 sent it: ready, steps, metrics, checkpoint, checkpoint_failed."""

    number: int
    job: str
    event: Event


@dataclass(frozen=True, kw_only=True)
class SegmentEnded:
    """A gang has ended and its devices are free. `decision` describes what follows.

    profile: its option as it was measured; the option that ran out of memory, if that is the outcome; None if nothing
        was measured.
    """

    number: int
    segment: PlannedSegment
    outcome: Outcome
    decision: str
    members: tuple[str, ...] = stored_as("fellows", default=())
    profile: Profile | None = field(default=None, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """A job has ended for good. `message` gives the reason; `details` hold step, metrics and model folder."""

    job: str
    status: JobStatus
    message: str
    details: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Segments that could start wait for devices that other processes of this machine hold. Sent on each change."""

    holders: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PredictionUpdate:
    """The ends of a batch and its jobs were predicted anew. batch: empty for a batch that runs alone."""

    batch: str
    prediction: Prediction


ExecutionEvent = Planned | SegmentStarted | GangSaid | SegmentEnded | JobEnded | Waiting | PredictionUpdate
Listener = Callable[[ExecutionEvent], None]


class Listeners:
    """Passes events on to listeners. One that raises is logged and detached, so that it ends no executor and no other.

    faults: by detached listener, what is missing since, and why. A listener says what it is for in an attribute
        PURPOSE, of its object where it is a method.
    on_fault: is called once with each listener that raises, and with what is missing since.
    """

    def __init__(
        self, listeners: Sequence[Listener], *, on_fault: Callable[[Listener, str], None] = lambda listener, fault: None
    ) -> None:
        self._listeners, self._on_fault = [*listeners], on_fault
        self.faults: dict[Listener, str] = {}

    def tell(self, event: ExecutionEvent) -> None:
        """Passes an event on."""
        for listener in [*self._listeners]:
            self.guard(listener, lambda listener=listener: listener(event))  # type: ignore[misc]

    def guard(self, listener: Listener, action: Callable[[], None]) -> None:
        """Performs an action of a listener; detaches the listener if it raises. Does nothing if it is detached."""
        if listener not in self._listeners:
            return
        try:
            action()
        except DatabaseClosed:  # this process is ending
            raise
        except Exception as error:
            self._listeners.remove(listener)
            purpose = getattr(getattr(listener, "__self__", listener), "PURPOSE", None)
            purpose = purpose or getattr(listener, "__qualname__", repr(listener))
            fault = printable_lines(f"{purpose} stopped on an error: {type(error).__name__}: {error}")
            self.faults[listener] = fault
            logger.exception("%s is detached; what it is for is missing from now on", purpose)
            self._on_fault(listener, fault)
