"""The progress of local gangs, stored in the batch's own database, where other processes can read it."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid, SegmentEnded
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.runtime.processes.events import Event, Metrics, PhaseStarted, Ready, Steps

EVERY_S = 2.0  # per segment: a write costs milliseconds, and people need no finer resolution
MOST_STEPS = 20  # the newest steps of an event, whose losses and seconds are stored


class StepEvents:
    """Writes each gang's progress at intervals, in the form in which a pool's nodes write all events of their gangs.

    The start of another phase is written at once, as the gang may be silent until its end.
    """

    PURPOSE = "the progress that other processes read"

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._message_store, self._clock = MessageStore(database), clock
        self._written: dict[int, tuple[int, float]] = {}  # by segment: how many events, and when the last ones were
        self._unstored: dict[int, dict[tuple[str, type[Event]], Event]] = {}  # by segment: newest event of each kind
        self._phases: dict[int, str] = {}

    def listen(self, event: ExecutionEvent) -> None:
        """Stores the event if it is about progress, at most one write every `EVERY_S` seconds per segment."""
        if isinstance(event, SegmentEnded):
            self._written.pop(event.number, None)
            self._unstored.pop(event.number, None)
            self._phases.pop(event.number, None)
            return
        if not isinstance(event, GangSaid) or not isinstance(event.event, (Steps, Metrics, PhaseStarted, Ready)):
            return
        number, told = event.number, event.event
        if isinstance(told, PhaseStarted):
            if self._phases.get(number) == told.phase:  # it goes on, with another timeout
                return
            self._phases[number] = told.phase
        told = told.newest(MOST_STEPS) if isinstance(told, Steps) else told
        self._unstored.setdefault(number, {})[event.job, type(told)] = told
        if isinstance(told, PhaseStarted) or (isinstance(told, Steps) and self._is_due(number)):
            self._store(number)

    def _is_due(self, number: int) -> bool:
        _, written_s = self._written.get(number, (0, -EVERY_S))
        return self._clock() - written_s >= EVERY_S

    def _store(self, number: int) -> None:
        reports = self._unstored.pop(number).values()
        num_written, _ = self._written.get(number, (0, 0.0))
        self._message_store.store(number, "", events=list(enumerate(reports, num_written)))
        self._written[number] = num_written + len(reports), self._clock()
