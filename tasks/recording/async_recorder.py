"""The asynchronous recorder: writes a batch's execution events to MLflow as runs, metrics, plans and models.

MLflow is slow (tens of milliseconds per call) and may be unavailable. So a separate thread writes in order and waits
for MLflow if necessary; training never waits. A batch is resumed from the journal, not from these records.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ringmaster.model_lineage.faults import LedgerError
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.waiting import Waiting
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid
from ringmaster.tasks.pool.batch_events import BatchEvents, EventReader, Position
from ringmaster.tasks.recording.mlflow_writer import JobsToRecord, MlflowWriter
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.interface.values import to_json
from ringmaster.text import printable_lines

__all__ = ["AsyncRecorder", "Insistence", "JobsToRecord", "PoolRecorder"]

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 5.0
MOST_WAITING = 100_000  # events to hold in memory while MLflow is unavailable
PATIENCE_AT_END_S = 120.0  # for an unavailable MLflow when a batch has ended
LOOK_EVERY_S = 2.0  # how often a pool's recorder polls the database
ENTRIES_AT_ONCE = 200

Notice = Callable[[str], None]
"""Receives a line of progress to display."""

AWAY = "training goes on, and what is to be recorded waits"


class Insistence:
    """Performs actions one after another, retrying each while MLflow is unavailable, until the patience ends.

    faults: descriptions of what can never be recorded.
    gave_up: whether the patience has ended; nothing is written any more.
    """

    def __init__(self, notice: Notice) -> None:
        self.faults: list[str] = []
        self._waiting = Waiting(notice, away=AWAY)

    @property
    def is_away(self) -> bool:
        """Whether a call waits for MLflow now."""
        return self._waiting.is_away

    @property
    def gave_up(self) -> bool:
        """Whether the patience has ended."""
        return self._waiting.gave_up

    def do(self, action: Callable[[], None]) -> bool:
        """Performs an action. Returns True if it succeeded or can never succeed, False if the patience has ended."""
        waiting = self._waiting
        if self.gave_up:
            return False
        try:
            waiting.call(action)
        except LedgerError as error:
            if waiting.gave_up:
                self.faults.append(f"not all was written: {error} Then `ringmaster run --resume` records the rest")
                return False
            self.faults.append(str(error))
        except Exception as error:
            logger.exception("a record cannot be written")
            self.faults.append(f"{type(error).__name__}: {error}")
        return True

    def hurry(self, patience_s: float) -> None:
        """Limits further waiting for MLflow to `patience_s` seconds. From any thread."""
        self._waiting.hurry(patience_s)


class AsyncRecorder:
    """Writes one batch into the ledger. Pass `listen` to the executor, and call `close` at the end.

    num_plans: the plans that are recorded already; by default those in the journal.
    tensors: the store for finished models.
    """

    PURPOSE = "the recorder of events in MLflow"

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        *,
        batch: Batch,
        notice: Notice = lambda _: None,
        num_plans: int = -1,
        tensors: TensorStore | None = None,
    ) -> None:
        self.ledger = ledger
        self._journal, self._notice = journal, notice
        # A resumed batch continues the count of plans.
        self._writer = MlflowWriter(
            ledger,
            journal,
            batch=batch,
            num_plans=len(journal.plans()) if num_plans < 0 else num_plans,
            tensors=tensors,
            notice=notice,
        )
        self._insist = Insistence(notice)
        self._num_dropped = 0
        self._has_failed = False
        self._todo: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def begin(self, known: JobsToRecord, *, devices: Sequence[str], num_trials: int) -> None:
        """Opens the batch's run, or resumes it."""
        key = self._journal.get("record_key")
        if key is None:
            key = uuid.uuid4().hex
            self._journal.put("record_key", key)
        self._do(partial(self._writer.begin, known, key=key, devices=devices, num_trials=num_trials))

    def listen(self, event: ExecutionEvent) -> None:
        """Passes an event to the writing thread. An executor's listener."""
        if isinstance(event, GangSaid) and self._todo.qsize() >= MOST_WAITING:
            self._num_dropped += 1
            return
        self._do(partial(self._writer.write, event, at_ms=int(time.time() * 1000)))

    def finish(self, *, status: str, metrics: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> None:
        """Closes the batch's run with its result."""
        self._do(partial(self._writer.finish, status=status, metrics=metrics, table=table))

    def close(self, *, patience_s: float | None = None) -> list[str]:
        """Waits until everything is written, and returns descriptions of what could not be.

        patience_s: how long to wait if MLflow is unavailable; by default `PATIENCE_AT_END_S`.
        """
        patience_s = PATIENCE_AT_END_S if patience_s is None else patience_s
        if self._insist.is_away and math.isfinite(patience_s):
            self._notice(f"waiting at most {patience_s:.0f} s for MLflow to come back")
        self._insist.hurry(patience_s)
        self._todo.put(None)
        self._thread.join()
        if self._num_dropped:
            dropped = f"{self._num_dropped} reports of step times and losses: MLflow was away for too long"
            self._insist.faults.append(dropped)
        return [*self._writer.faults, *self._insist.faults]

    @property
    def is_complete(self) -> bool:
        """Whether every event that can be recorded is recorded. Valid after `close`."""
        return not self._insist.gave_up and not self._num_dropped and not self._has_failed

    def run_of(self, job: str | None = None) -> str | None:
        """Returns the MLflow run of the batch or of a job, None before it is open."""
        return self._writer.run_of(job)

    # -- the writing thread -------------------------------------------------------------------------------------------

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.put(lambda: self._attempt(action))

    def _attempt(self, action: Callable[[], None]) -> None:
        self._insist.do(action)

    def _work(self) -> None:
        try:
            self._write()
        except Exception as error:
            logger.exception("the recorder ends here")
            self._has_failed = True
            fault = f"all events since the recorder stopped on an error: {type(error).__name__}: {error}"
            self._insist.faults.append(printable_lines(fault))

    def _write(self) -> None:
        flushed_s = time.monotonic()
        while (action := self._next(flushed_s)) is not None:
            action()
            if time.monotonic() - flushed_s >= FLUSH_EVERY_S:
                self._insist.do(self._writer.flush)
                flushed_s = time.monotonic()

    def _next(self, flushed_s: float) -> Callable[[], None] | None:
        """Returns the next action; one without effect when it is time to flush."""
        try:
            return self._todo.get(timeout=max(flushed_s + FLUSH_EVERY_S - time.monotonic(), 0.1))
        except queue.Empty:
            return lambda: None


class PoolRecorder(AsyncRecorder):
    """Writes one batch of a pool: reads its events from the pool's database, from where an earlier recorder stopped.

    It stores its position only after MLflow has accepted the records. Events that are read twice are written twice,
    which changes nothing.
    """

    CURSOR = "recorded"  # the fact: the `Position` after the last recorded event, and "plans": how many are recorded

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        *,
        batch: Batch,
        events: BatchEvents,
        notice: Notice,
        tensors: TensorStore | None = None,
    ) -> None:
        at = journal.get(self.CURSOR, {})
        after = Position(told=at.get("told", 0), said=at.get("said", 0))
        self._reader = EventReader(events, after)
        self._is_over = threading.Event()
        super().__init__(ledger, journal, batch=batch, notice=notice, num_plans=at.get("plans", 0), tensors=tensors)

    def follow(self) -> None:
        """Starts to write the events of the batch, until `close`."""
        self._todo.put(self._follow)

    def finish(self, *, status: str, metrics: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> None:
        """Closes the batch's run with its result, after all events logged until now."""
        self._is_over.set()
        super().finish(status=status, metrics=metrics, table=table)

    def close(self, *, patience_s: float | None = None) -> list[str]:
        """Waits like `AsyncRecorder.close`. The next recorder of the batch writes what is left."""
        self._is_over.set()
        faults = super().close(patience_s=patience_s)
        if num := self._reader.num_unreadable:
            faults.append(
                f"{num} events that cannot be read, as the pool's database is damaged: the log has their numbers"
            )
        return faults

    def _follow(self) -> None:
        while not self._insist.gave_up:
            is_last = self._is_over.is_set()
            entries = self._reader.read(most=ENTRIES_AT_ONCE)
            for entry in entries:
                at_ms = int(entry.time_s * 1000)
                if not self._insist.do(partial(self._writer.write, entry.event, at_ms=at_ms)):
                    return
            if not self._insist.do(self._writer.flush):
                return
            if entries:
                self._journal.put(self.CURSOR, {**to_json(entries[-1].at), "plans": self._writer.num_plans})
            elif is_last:
                return
            else:
                self._is_over.wait(LOOK_EVERY_S)
