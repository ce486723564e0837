"""The events that an executor reports to its listeners: progress views, the MLflow recorder, Prefect artifacts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringmaster.codec import SINCE_LATER, from_json, stored_as, to_json
from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.storage.database import DatabaseClosed
from ringmaster.tasks.storage.fact_keys import FIRST_PREDICTION, NEWEST_PREDICTION
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.gang_events import Event, Outcome
from ringmaster.text import printable_lines

logger = logging.getLogger(__name__)

COVERAGE = 0.9  # the share of ends that should be in their interval


@dataclass(frozen=True, kw_only=True)
class PredictedEnd:
    """When something ends.

    end_s: the median.
    low_s, high_s: the interval that contains the end with probability `COVERAGE`.
    earliest_s: no plan ends it before, as long as no step is quicker than by `SpeedBelief.least_ratio`; None in
        predictions of earlier releases.
    latest_s: it ends by then with probability `COVERAGE`; None like `earliest_s`.
    """

    end_s: float
    low_s: float
    high_s: float
    earliest_s: float | None = field(default=None, metadata=SINCE_LATER)
    latest_s: float | None = field(default=None, metadata=SINCE_LATER)

    @property
    def bounds_s(self) -> tuple[float, float]:
        """The certified earliest and the latest end; the interval in predictions of earlier releases."""
        earliest_s = self.low_s if self.earliest_s is None else self.earliest_s
        return earliest_s, self.high_s if self.latest_s is None else self.latest_s

    def mapped(self, change: Callable[[float], float]) -> PredictedEnd:
        """Returns the end with all times changed."""
        return PredictedEnd(
            end_s=change(self.end_s),
            low_s=change(self.low_s),
            high_s=change(self.high_s),
            earliest_s=None if self.earliest_s is None else change(self.earliest_s),
            latest_s=None if self.latest_s is None else change(self.latest_s),
        )

    def later(self, seconds: float) -> PredictedEnd:
        """Returns the same end in seconds that count from `seconds` earlier."""
        return self.mapped(lambda at_s: at_s + seconds)

    def not_before(self, now_s: float) -> PredictedEnd:
        """Returns the end of something that has not ended at `now_s`."""
        return self.mapped(lambda at_s: max(at_s, now_s))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted ends of a batch and its jobs. All seconds count from the batch's begin.

    makespan_s: when the last job ends, the median.
    low_s, high_s: the interval that contains the actual makespan with probability `coverage`.
    load: the load of the machine when the plan was made (`tasks/profiling/machine_load.py`), which the plan contains.
    run_load: its mean load since the begin; None before it is known.
    spread: the expected logarithmic error of the end that follows from the speeds alone.
    num_earlier: the number of earlier runs whose errors correct it.
    uncorrected_s: the median makespan by the speeds alone; None in predictions of earlier releases.
    jobs: the end of each job that has not ended.
    since_s: the batch's begin, in seconds since the epoch; 0 if it has not begun.
    made_s: when it was made.
    earliest_s, latest_s: the certified earliest and the latest end of the batch, as in `PredictedEnd`.
    """

    makespan_s: float
    low_s: float
    high_s: float
    load: float
    spread: float
    num_earlier: int
    coverage: float = COVERAGE
    uncorrected_s: float | None = None
    jobs: Mapping[str, PredictedEnd] = field(default_factory=dict)
    since_s: float = 0.0
    made_s: float = 0.0
    earliest_s: float | None = field(default=None, metadata=SINCE_LATER)
    latest_s: float | None = field(default=None, metadata=SINCE_LATER)
    run_load: float | None = field(default=None, metadata=SINCE_LATER)

    @property
    def end(self) -> PredictedEnd:
        """The end of the batch."""
        return PredictedEnd(
            end_s=self.makespan_s,
            low_s=self.low_s,
            high_s=self.high_s,
            earliest_s=self.earliest_s,
            latest_s=self.latest_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form, with seconds to a thousandth."""
        data: dict[str, Any] = to_json(self)
        jobs = {name: {key: round(value, 3) for key, value in end.items()} for name, end in data["jobs"].items()}
        return {**data, "jobs": jobs}


def predictions_in(facts: Mapping[str, Any]) -> tuple[Prediction | None, Prediction | None]:
    """Returns the first and the newest prediction of a batch by its facts; None for what is missing or unreadable."""
    return _read(facts.get(FIRST_PREDICTION)), _read(facts.get(NEWEST_PREDICTION) or facts.get(FIRST_PREDICTION))


def _read(data: Any) -> Prediction | None:
    try:
        return None if data is None else from_json(Prediction, data)
    except ValueError:  # of another release
        return None


@dataclass(frozen=True, kw_only=True)
class PlanUpdate:
    """A plan was made, the first one or another. `why` gives the reason.

    begins_s: its time 0, in seconds since the epoch; 0 where that is when it is followed.
    """

    problem: Problem
    plan: Plan
    why: str
    begins_s: float = 0.0

    def continues(self, before: PlanUpdate) -> bool:
        """Whether it trains on each device what was left of the plan before, in the same order; times may differ."""
        jobs = {job.id for job in self.problem.jobs}
        queues = before._queues()
        for device, queue in self._queues().items():
            left = [each for each in queues.get(device, ()) if each[0] in jobs]
            if left[-len(queue) :] != queue:
                return False
        return True

    def _queues(self) -> dict[DeviceId, list[tuple[str, int]]]:
        """Returns by device the jobs in order, and the numbers of their options."""
        queues: dict[DeviceId, list[tuple[str, int]]] = {}
        for segment in sorted(self.plan.segments, key=lambda segment: segment.start_s):
            for device in ((node, number) for node, numbers in segment.devices for number in numbers):
                queue = queues.setdefault(device, [])
                if queue[-1:] != [(segment.job, segment.option)]:
                    queue.append((segment.job, segment.option))
        return queues


@dataclass(frozen=True, kw_only=True)
class SegmentStarted:
    """A gang was started.

    number: the segment's number in the journal.
    attempt: counts from 1.
    members: the other jobs that the gang trains.
    num_steps: the steps of the job and of each member, from their first to their last; empty where unknown.
    predicted_bytes: the memory that a device is predicted to need; None where it is unknown, or where the gang reports
        another kind of memory.
    """

    number: int
    segment: PlannedSegment
    technique: str
    num_devices: int
    first_step: int
    attempt: int
    members: tuple[str, ...] = stored_as("fellows", default=())
    num_steps: tuple[int, ...] = ()
    predicted_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GangReport:
    """Any `Event` of a running gang, except those in `gang.SUPERVISION`, for one of its jobs."""

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
    profile: Profile | None = None


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """A job has ended for good. The message of its record gives the reason."""

    record: JobRecord

    @property
    def job(self) -> str:
        """The name of the job."""
        return self.record.name


@dataclass(frozen=True, kw_only=True)
class DeviceWait:
    """Segments that could start wait for devices that other processes of this machine hold. Sent on each change."""

    holders: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PredictionUpdate:
    """The ends of a batch and its jobs were predicted again.

    batch: empty for a batch that runs alone.
    age_s: the seconds since then.
    """

    batch: str
    prediction: Prediction
    age_s: float = 0.0


ExecutionEvent = PlanUpdate | SegmentStarted | GangReport | SegmentEnded | JobEnded | DeviceWait | PredictionUpdate
Listener = Callable[[ExecutionEvent], None]


class Listeners:
    """Passes events on to listeners. One that raises is logged and detached, so that it ends no executor and no other.

    faults: by detached listener, what is missing since, and why. A listener describes its purpose in an attribute
        PURPOSE, of its object where it is a method.
    on_fault: is called once with each listener that raises, and with what is missing since.
    """

    def __init__(
        self, listeners: Sequence[Listener], *, on_fault: Callable[[Listener, str], None] = lambda listener, fault: None
    ) -> None:
        self._listeners, self._on_fault = [*listeners], on_fault
        self.faults: dict[Listener, str] = {}

    def add(self, listener: Listener) -> None:
        """Adds a listener."""
        self._listeners.append(listener)

    def notify(self, event: ExecutionEvent) -> None:
        """Passes an event on."""
        for listener in [*self._listeners]:
            self.guard(listener, listener, event)

    def guard(self, listener: Listener, action: Callable[..., None], *of: object) -> None:
        """Performs an action of a listener; detaches the listener if it raises. Does nothing if it is detached."""
        if listener not in self._listeners:
            return
        try:
            action(*of)
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
