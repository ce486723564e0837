"""The progress of local gangs, stored in the batch's own database, where other processes can read it."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid, SegmentEnded
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.processes.events import Event, Metrics, PhaseStarted, Ready, Steps

EVERY_S = 2.0  # per segment: a write costs milliseconds, and people need no finer resolution
MOST_PHASES = 10  # that are written at once; a gang may have one more every `EVERY_S`
MOST_STEPS = 20  # the newest steps of an event, whose losses and seconds are stored


class StepEvents:
    """Writes each gang's progress at intervals, in the form in which a pool's nodes write all events of their gangs.

    The start of another phase is written at once, as the gang may be silent until its end. Phases that follow each
    other quickly, as those of a job that is evaluated at every step, are written at intervals too: each write waits for
    the disk, and the executor for the write.
    """

    PURPOSE = "the progress that other processes read"

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._message_store, self._clock = MessageStore(database), clock
        self._written: dict[int, tuple[int, float]] = {}  # by segment: how many events, and when the last ones were
        self._unstored: dict[int, dict[tuple[str, type[Event]], Event]] = {}  # by segment: newest event of each kind
        self._phases: dict[int, str] = {}
        self._may_write: dict[int, tuple[float, float]] = {}  # by segment: how many phases at once, and since when

    def listen(self, event: ExecutionEvent) -> None:
        """Stores the event if it is about progress, at most one write every `EVERY_S` seconds per segment."""
        if isinstance(event, SegmentEnded):
            self._written.pop(event.number, None)
            self._unstored.pop(event.number, None)
            self._phases.pop(event.number, None)
            self._may_write.pop(event.number, None)
            return
        if not isinstance(event, GangSaid) or not isinstance(event.event, (Steps, Metrics, PhaseStarted, Ready)):
            return
        number, told = event.number, event.event
        if isinstance(told, PhaseStarted):
            if self._phases.get(number) == told.phase:  # it goes on, with another timeout
                return
            self._phases[number] = told.phase
        told = told.newest(MOST_STEPS) if isinstance(told, Steps) else told
        unstored, key = self._unstored.setdefault(number, {}), (event.job, type(told))
        unstored.pop(key, None)  # so that they stay in order
        unstored[key] = told
        if isinstance(told, PhaseStarted):
            is_due = self._is_phase_due(number)
        else:
            is_due = isinstance(told, Steps) and self._is_due(number)
        if is_due:
            self._store(number)

    def _is_due(self, number: int) -> bool:
        _, written_s = self._written.get(number, (0, -EVERY_S))
        return self._clock() - written_s >= EVERY_S

    def _is_phase_due(self, number: int) -> bool:
        now_s = self._clock()
        num_left, since_s = self._may_write.get(number, (float(MOST_PHASES), now_s))
        num_left = min(float(MOST_PHASES), num_left + (now_s - since_s) / EVERY_S)
        is_due = num_left >= 1.0
        self._may_write[number] = num_left - is_due, now_s
        return is_due

    def _store(self, number: int) -> None:
        reports = self._unstored.pop(number).values()
        num_written, _ = self._written.get(number, (0, 0.0))
        self._message_store.store(number, "", events=list(enumerate(reports, num_written)))
        self._written[number] = num_written + len(reports), self._clock()
