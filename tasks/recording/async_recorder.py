"""The asynchronous recorder: writes a batch's execution events to MLflow as runs, metrics, plans and models.

MLflow is slow (tens of milliseconds per call) and may be unavailable. So a separate thread writes in order and waits
for MLflow if necessary; training never waits. A batch is resumed from the journal, not from these records. What could
not be written waits in the journal, and is written when the batch is resumed.
"""

import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ringmaster.codec import to_json
from ringmaster.errors import LedgerError
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.mlflow_calls import OutageRetry
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.execution_events import ExecutionEvent, GangReport, JobEnded, PredictionUpdate
from ringmaster.tasks.pool.event_log import BatchEvents, EventReader, LogPosition, content_of, event_of, kind_of
from ringmaster.tasks.recording.mlflow_writer import MlflowWriter
from ringmaster.tasks.recording.model_writer import JobsToRecord
from ringmaster.tasks.storage.fact_keys import UNRECORDED
from ringmaster.tasks.storage.journal import Journal
from ringmaster.text import Notice, printable_lines

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 5.0
MAX_FLUSH_SHARE = 0.02  # of the time: a sweep has a request for each of its trials, and on CPUs they train here, too
MAX_WAITING = 100_000  # events to hold in memory while MLflow is unavailable
TIMEOUT_AT_END_S = 120.0  # for an unavailable MLflow when a batch has ended
LOOK_EVERY_S = 2.0  # how often a pool's recorder polls the database
ENTRIES_AT_ONCE = 200

AWAY = "training continues, and what is to be recorded waits"


class AsyncRecorder:
    """Writes one batch into the ledger. Pass `listen` to the executor, and call `close` at the end.

    num_plans: the plans that are recorded already; by default those in the journal.
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
    ) -> None:
        self.ledger = ledger
        self._journal, self._notice = journal, notice
        self._left_by_earlier_process: Mapping[str, Any] = journal.get(UNRECORDED) or {}
        if num_plans < 0:  # a resumed batch continues the count of plans
            num_plans = self._left_by_earlier_process.get("num_plans", len(journal.plans()))
        self._writer = MlflowWriter(ledger, journal, batch=batch, num_plans=num_plans, notice=notice)
        self._retry = OutageRetry(notice, away=AWAY)
        self._write_faults: list[str] = []  # what can never be recorded, or not by this process
        self._num_dropped = 0
        self._has_stopped = False
        self._failed_now: list[tuple[ExecutionEvent, int]] = []
        self._todo: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def begin(self, known: JobsToRecord, *, devices: Sequence[str], num_trials: int) -> None:
        """Opens the batch's run, or resumes it and writes what could not be written before.

        If MLflow is away, its return is waited for while training continues. Raises LedgerError if MLflow refuses the
        run: then nothing of the batch can be recorded.
        """
        key = self._journal.get("record_key")
        if key is None:
            key = uuid.uuid4().hex
            self._journal.put("record_key", key)
        begin = partial(self._writer.begin, known, key=key, devices=devices, num_trials=num_trials)
        try:
            begin()
        except LedgerError as error:
            if not error.may_pass:
                raise
            self._todo.put(partial(self._do, begin))
        self._todo.put(self._write_left_by_earlier_process)

    def listen(self, event: ExecutionEvent) -> None:
        """Passes an event to the writing thread. An executor's listener."""
        if isinstance(event, PredictionUpdate):  # no record, and too many to wait for an MLflow that is away
            return
        if isinstance(event, GangReport) and self._todo.qsize() >= MAX_WAITING:
            self._num_dropped += 1
            return
        self._todo.put(partial(self._write, event, at_ms=int(time.time() * 1000)))

    def finish(self, *, status: str, metrics: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> None:
        """Closes the batch's run with its result."""
        action = partial(self._writer.finish, status=status, metrics=metrics, table=table)
        self._todo.put(partial(self._do, action))

    def close(self, *, timeout_s: float | None = None) -> list[str]:
        """Waits until everything is written, and returns descriptions of what could not be. That waits in the journal.

        timeout_s: how long to wait if MLflow is unavailable; by default `TIMEOUT_AT_END_S`.
        """
        timeout_s = TIMEOUT_AT_END_S if timeout_s is None else timeout_s
        if self._retry.is_away and math.isfinite(timeout_s):
            self._notice(f"waiting at most {timeout_s:.0f} s for MLflow to come back")
        self._retry.hurry(timeout_s)
        self._todo.put(None)
        self._thread.join()
        self._writer.close()
        if self._num_dropped:
            dropped = f"{self._num_dropped} reports of step times and losses: MLflow was away for too long"
            self._write_faults.append(dropped)
        self._store_failed()
        return self._faults

    @property
    def is_complete(self) -> bool:
        """Whether all is recorded. Valid after `close`."""
        return not (self._retry.gave_up or self._has_stopped or self._faults)

    def run_of(self, job: str | None = None) -> str | None:
        """Returns the MLflow run of the batch or of a job, None before it is open."""
        return self._writer.run_of(job)

    # -- the writing thread -------------------------------------------------------------------------------------------

    @property
    def _faults(self) -> list[str]:
        return list(dict.fromkeys([*self._writer.faults, *self._write_faults]))

    def _do(self, action: Callable[[], None]) -> bool:
        """Performs an action, and again for as long as MLflow is away and the patience lasts.

        Returns whether it succeeded.
        """
        if self._retry.gave_up:
            return False
        try:
            self._retry.call(action)
        except LedgerError as error:
            later = f"not all was written: {error} Then `ringmaster run --resume` records the rest"
            self._write_faults.append(later if self._retry.gave_up else str(error))
            return False
        except Exception as error:
            logger.exception("a record cannot be written")
            self._write_faults.append(f"{type(error).__name__}: {error}")
            return False
        return True

    def _write(self, event: ExecutionEvent, *, at_ms: int) -> None:
        """Writes an event. One that cannot be written is kept, and the points of a gang's event wait for `flush`."""
        if isinstance(event, GangReport) and self._retry.gave_up:
            self._writer.write(event, at_ms=at_ms)
        elif not self._do(partial(self._writer.write, event, at_ms=at_ms)):
            self._failed_now.append((event, at_ms))

    def _write_left_by_earlier_process(self) -> None:
        """Writes what earlier processes of this run could not write, or did not live to write."""
        self._writer.restore_points(self._left_by_earlier_process.get("points", {}))
        kept = [
            (event_of(kind, content), at_ms) for kind, content, at_ms in self._left_by_earlier_process.get("events", ())
        ]
        for event, at_ms in kept:
            self._write(event, at_ms=at_ms)
        now_ms = int(time.time() * 1000)
        ended = {event.job for event, _ in kept if isinstance(event, JobEnded)}
        for event in self._writer.unrecorded_ends():
            if event.job not in ended:
                self._write(event, at_ms=now_ms)

    def _store_failed(self) -> None:
        """Stores what is not written in the journal, for the next process of this run."""
        events = [
            [kind_of(event), content_of(event), at_ms]
            for event, at_ms in self._failed_now
            if not isinstance(event, GangReport)
        ]
        points = self._writer.waiting_points()
        kept = {"events": events, "points": points, "num_plans": self._writer.num_plans}
        self._journal.put(UNRECORDED, kept if self._faults else {})

    def _work(self) -> None:
        next_s = time.monotonic() + FLUSH_EVERY_S
        try:
            while (action := self._next(next_s)) is not None:
                action()
                if (now_s := time.monotonic()) >= next_s:
                    self._do(self._writer.flush)
                    done_s = time.monotonic()
                    next_s = done_s + max(FLUSH_EVERY_S, (done_s - now_s) / MAX_FLUSH_SHARE)
        except Exception as error:
            logger.exception("the recorder ends here")
            self._has_stopped = True
            fault = f"the records have stopped: {type(error).__name__}: {error}"
            self._write_faults.append(printable_lines(fault))

    def _next(self, flush_s: float) -> Callable[[], object] | None:
        """Returns the next action; one without effect when it is time to flush."""
        try:
            return self._todo.get(timeout=max(flush_s - time.monotonic(), 0.1))
        except queue.Empty:
            return lambda: None


class PoolRecorder(AsyncRecorder):
    """Writes one batch of a pool: reads its events from the pool's database, from where an earlier recorder stopped.

    It stores its position only after MLflow has accepted the records. Events that are read twice are written twice,
    which changes nothing.
    """

    CURSOR = "recorded"  # the fact: the `LogPosition` after the last recorded event, and "plans": how many are recorded

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        *,
        batch: Batch,
        events: BatchEvents,
        notice: Notice,
    ) -> None:
        at = journal.get(self.CURSOR, {})
        after = LogPosition(decision=at.get("told", 0), gang_event=at.get("said", 0))
        self._reader = EventReader(events, after)
        self._is_over = threading.Event()
        super().__init__(ledger, journal, batch=batch, notice=notice, num_plans=at.get("plans", 0))

    def begin(self, known: JobsToRecord, *, devices: Sequence[str], num_trials: int) -> None:
        """Opens the batch's run as `AsyncRecorder.begin`, and writes the events of the batch until `close`."""
        super().begin(known, devices=devices, num_trials=num_trials)
        self._todo.put(self._follow)

    def finish(self, *, status: str, metrics: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> None:
        """Closes the batch's run with its result, after all events logged until now."""
        self._is_over.set()
        super().finish(status=status, metrics=metrics, table=table)

    def close(self, *, timeout_s: float | None = None) -> list[str]:
        """Waits like `AsyncRecorder.close`. The next recorder of the batch writes what is left."""
        self._is_over.set()
        faults = super().close(timeout_s=timeout_s)
        if num := self._reader.num_unreadable:
            faults.append(
                f"{num} events that cannot be read, as the pool's database is damaged: the log has their numbers"
            )
        return faults

    def _follow(self) -> None:
        while not self._retry.gave_up and self._record_page():
            pass

    def _record_page(self) -> bool:
        """Records the next events, and waits where there are none yet. Returns whether more are to be expected."""
        is_last = self._is_over.is_set()
        entries = self._reader.read(most=ENTRIES_AT_ONCE)
        num_failed = len(self._failed_now)
        for entry in entries:
            self._write(entry.event, at_ms=int(entry.time_s * 1000))
        self._do(self._writer.flush)
        if self._retry.gave_up:
            del self._failed_now[num_failed:]  # the next recorder reads them again
            return False
        if entries:
            self._journal.put(self.CURSOR, {**to_json(entries[-1].at), "plans": self._writer.num_plans})
        elif not is_last:
            self._is_over.wait(LOOK_EVERY_S)
        return bool(entries) or not is_last
