"""Step events of local gangs, stored in the batch's own database, where other processes can read the progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.runtime.processes.events import Steps

EVERY_S = 2.0  # per segment: a write costs milliseconds, and people need no finer resolution
MOST_STEPS = 20  # the newest steps of an event, whose seconds are stored


class StepEvents:
    """Writes each gang's progress at intervals, in the form in which a pool's nodes write all events of their gangs."""

    PURPOSE = "the progress that other processes read"

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._message_store, self._clock = MessageStore(database), clock
        self._said: dict[int, tuple[int, float]] = {}  # by segment: number of events written, and when the last one was
        self._unstored: dict[int, dict[str, Steps]] = {}  # by segment: newest event of each job

    def listen(self, event: ExecutionEvent) -> None:
        """Stores a `steps` event, at most one write every `EVERY_S` seconds per segment. An executor's listener."""
        if not isinstance(event, GangSaid) or not isinstance(event.event, Steps):
            return
        steps = event.event
        kept = steps.seconds[-MOST_STEPS:]
        report = Steps(job=steps.job, first_step=steps.step - len(kept), seconds=kept)
        self._unstored.setdefault(event.number, {})[event.job] = report
        num_reports, said_s = self._said.get(event.number, (0, -EVERY_S))
        if self._clock() - said_s < EVERY_S:
            return
        reports = self._unstored.pop(event.number).values()
        self._message_store.store(event.number, "", events=list(enumerate(reports, num_reports)))
        self._said[event.number] = num_reports + len(reports), self._clock()
