"""The progress of gangs, which a run on this machine stores for other processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ringmaster.tasks.execution.execution_events import ExecutionEvent, GangReport, SegmentEnded
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.processes.gang_events import (
    EvaluationReported,
    Event,
    JobReady,
    PhaseStarted,
    Steps,
)

EVERY_S = 2.0  # per segment: a write costs milliseconds, and pages need no finer resolution
MAX_PHASES = 10  # that are written at once; a gang may have one more every `EVERY_S`
MAX_STEPS = 200  # the newest steps of each write, whose losses and seconds are stored: curves of most jobs are whole


@dataclass
class _UnstoredEvents:
    """What a gang has reported that is not stored yet.

    events: the newest of each kind, by job and kind.
    num_stored, stored_s: how many events are stored, and when the last ones were.
    num_phases, since_s: how many phases may be stored at once, and since when.
    """

    since_s: float
    events: dict[tuple[str, type[Event]], Event] = field(default_factory=dict)
    num_stored: int = 0
    stored_s: float = -math.inf
    phase: str = ""
    num_phases: float = MAX_PHASES


class StepEvents:
    """Writes each gang's progress at intervals, in the form in which a pool's nodes write all events of their gangs.

    The start of another phase is written at once, as the gang may be silent until its end. Phases that follow each
    other quickly, as those of a job that is evaluated at every step, are written at intervals too: each write waits for
    the disk, and the executor for the write.
    """

    PURPOSE = "the progress that other processes read"

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._message_store, self._clock = MessageStore(database), clock
        self._unstored: dict[int, _UnstoredEvents] = {}  # by segment

    def listen(self, event: ExecutionEvent) -> None:
        """Stores the event if it is about progress, at most one write every `EVERY_S` seconds per segment.

        The steps since the last write are stored as one event, and what is left once the segment ends.
        """
        if isinstance(event, SegmentEnded) and (left := self._unstored.pop(event.number, None)):
            self._store(event.number, left)
        if not isinstance(event, GangReport) or not isinstance(
            event.event, (Steps, EvaluationReported, PhaseStarted, JobReady)
        ):
            return
        report, now_s, is_due = event.event, self._clock(), False
        own = self._unstored.setdefault(event.number, _UnstoredEvents(since_s=now_s))
        if isinstance(report, PhaseStarted):
            if own.phase == report.phase:  # it continues, with another timeout
                return
            own.phase = report.phase
            num_phases = min(float(MAX_PHASES), own.num_phases + (now_s - own.since_s) / EVERY_S)
            is_due = num_phases >= 1.0
            own.num_phases, own.since_s = num_phases - is_due, now_s
        elif isinstance(report, Steps):
            is_due = now_s - own.stored_s >= EVERY_S
        before = own.events.pop((event.job, type(report)), None)  # so that they stay in order
        if isinstance(report, Steps) and isinstance(before, Steps) and before.step == report.first_step:
            report = _joined(before, report)
        own.events[event.job, type(report)] = report
        if is_due:
            self._store(event.number, own)

    def _store(self, number: int, own: _UnstoredEvents) -> None:
        events = [each.newest(MAX_STEPS) if isinstance(each, Steps) else each for each in own.events.values()]
        if events:
            self._message_store.store(number, "", events=list(enumerate(events, own.num_stored)))
        own.num_stored, own.stored_s = own.num_stored + len(events), self._clock()
        own.events.clear()


def _joined(before: Steps, report: Steps) -> Steps:
    """Returns the report with the steps of the one before it; at most twice as many as are stored."""
    before = before.newest(MAX_STEPS)

    def joined(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
        return (*one, *other) if one and other else ()

    return replace(
        report,
        first_step=before.first_step,
        seconds=(*before.seconds, *report.seconds),
        losses=joined(before.losses, report.losses),
        rewards=joined(before.rewards, report.rewards),
        num_samples=before.num_samples + report.num_samples,
        num_tokens=before.num_tokens + report.num_tokens,
    )
