"""Records a batch in MLflow while it runs: what the executor tells becomes runs, metrics, plans and models.

MLflow is slow (tens of milliseconds a call) and may be away; so a thread of its own does the writing, in order, and
waits for MLflow where it must: training never does. The journal, not this, is what a batch is resumed from.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ringmaster.model_lineage.faults import LedgerError
from ringmaster.model_lineage.ledger import Ledger
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.waiting import Waiting
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid
from ringmaster.tasks.execution.journal import Journal
from ringmaster.tasks.pool.told import Told
from ringmaster.tasks.scribe import Recorded, Scribe

__all__ = ["Insistence", "PoolRecorder", "Recorded", "Recorder"]

FLUSH_EVERY_S = 5.0
MOST_WAITING = 100_000  # events that wait in memory while MLflow is away
PATIENCE_AT_END_S = 120.0  # with an MLflow that is away when a batch has ended
LOOK_EVERY_S = 2.0  # of a pool's recorder, for what was told meanwhile
ENTRIES_AT_ONCE = 200

Notice = Callable[[str], None]
"""Takes a line of progress for a person."""

AWAY = "training goes on, and what is to be recorded waits"


class Insistence:
    """Does one thing after another, each again for as long as MLflow is away, until patience ends.

    faults: what can never be recorded. gave_up: patience has ended; nothing is done any more.
    """

    def __init__(self, notice: Notice) -> None:
        self.faults: list[str] = []
        self._waiting = Waiting(notice, away=AWAY)

    @property
    def is_away(self) -> bool:
        """Whether MLflow is waited for just now."""
        return self._waiting.is_away

    @property
    def gave_up(self) -> bool:
        """Whether patience has ended."""
        return self._waiting.gave_up

    def do(self, action: Callable[[], None]) -> bool:
        """Whether the action is done with: it went well, or can never; False where patience has ended."""
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
        except Exception as error:  # noqa: BLE001 - the last frame of a thread: told when the batch ends
            self.faults.append(f"{type(error).__name__}: {error}")
        return True

    def hurry(self, patience_s: float) -> None:
        """From now on, waits for MLflow for so long at the most. From any thread."""
        self._waiting.hurry(patience_s)


class Recorder:
    """Writes one batch into the ledger; give its `listen` to the executor, and `close` it at the end.

    tensors: the store that finished models are kept in too.
    """

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
        # A batch that is resumed goes on counting.
        self._scribe = Scribe(
            ledger,
            journal,
            batch=batch,
            num_plans=len(journal.plans()) if num_plans < 0 else num_plans,
            tensors=tensors,
            notice=notice,
        )
        self._insist = Insistence(notice)
        self._num_dropped = 0
        self._todo: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def begin(self, known: Recorded, *, devices: Sequence[str], num_trials: int) -> None:
        """Opens the batch's run, or goes on with it."""
        key = self._journal.get("record_key")
        if key is None:
            key = uuid.uuid4().hex
            self._journal.put("record_key", key)
        self._do(partial(self._scribe.begin, known, key=key, devices=devices, num_trials=num_trials))

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener: hands the event to the writing thread."""
        if isinstance(event, GangSaid) and self._todo.qsize() >= MOST_WAITING:
            self._num_dropped += 1
            return
        self._do(partial(self._scribe.write, event, at_ms=int(time.time() * 1000)))

    def finish(self, *, status: str, metrics: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> None:
        """Closes the batch's run with its result."""
        self._do(partial(self._scribe.finish, status=status, metrics=metrics, table=table))

    def close(self, *, patience_s: float | None = None) -> list[str]:
        """Waits until all is written, for an MLflow that is away no longer than `patience_s`, by default
        `PATIENCE_AT_END_S`; returns what could not be."""
        patience_s = PATIENCE_AT_END_S if patience_s is None else patience_s
        if self._insist.is_away and math.isfinite(patience_s):
            self._notice(f"waiting at most {patience_s:.0f} s for MLflow to come back")
        self._insist.hurry(patience_s)
        self._todo.put(None)
        self._thread.join()
        if self._num_dropped:
            dropped = f"{self._num_dropped} reports of step times and losses: MLflow was away for too long"
            self._insist.faults.append(dropped)
        return [*self._scribe.faults, *self._insist.faults]

    @property
    def is_complete(self) -> bool:
        """Whether all that was given, and could be recorded, is; asked after `close`."""
        return not self._insist.gave_up and not self._num_dropped

    def run_of(self, job: str | None = None) -> str | None:
        """The MLflow run of the batch, or of a job, once it is open."""
        return self._scribe.run_of(job)

    # -- the writing thread ------------------------------------------------------------------------------------------

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.put(lambda: self._attempt(action))

    def _attempt(self, action: Callable[[], None]) -> None:
        self._insist.do(action)

    def _work(self) -> None:
        flushed_s = time.monotonic()
        while (action := self._next(flushed_s)) is not None:
            action()
            if time.monotonic() - flushed_s >= FLUSH_EVERY_S:
                self._insist.do(self._scribe.flush)
                flushed_s = time.monotonic()

    def _next(self, flushed_s: float) -> Callable[[], None] | None:
        """What is to be done next: what was asked, or a flush when it is time and nothing was."""
        try:
            return self._todo.get(timeout=max(flushed_s + FLUSH_EVERY_S - time.monotonic(), 0.1))
        except queue.Empty:
            return lambda: None


class PoolRecorder(Recorder):
    """Writes one batch of a pool: reads what its executor tells, from where an earlier recorder of the batch was.

    Where it is, it writes down only after MLflow has taken the records: what is read twice is written twice, which
    changes nothing.
    """

    CURSOR = "recorded"  # the fact: {"told": the last event that is recorded, "plans": how many plans are}

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        *,
        batch: Batch,
        told: Told,
        key: str,
        notice: Notice,
        tensors: TensorStore | None = None,
    ) -> None:
        self._at = journal.get(self.CURSOR, {"told": 0, "plans": 0})
        self._told, self._key = told, key
        self._is_over = threading.Event()
        super().__init__(ledger, journal, batch=batch, notice=notice, num_plans=self._at["plans"], tensors=tensors)

    def follow(self) -> None:
        """From now on, writes what is told, until `close`."""
        self._todo.put(self._follow)

    def finish(self, *, status: str, metrics: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> None:
        """Closes the batch's run with its result, after all that was told of it until now."""
        self._is_over.set()
        super().finish(status=status, metrics=metrics, table=table)

    def close(self, *, patience_s: float | None = None) -> list[str]:
        """Waits likewise; what is not written then is written by whoever records the batch next."""
        self._is_over.set()
        return super().close(patience_s=patience_s)

    def _follow(self) -> None:
        while not self._insist.gave_up:
            is_last = self._is_over.is_set()
            entries = self._told.after(self._key, self._at["told"], most=ENTRIES_AT_ONCE)
            for entry in entries:
                at_ms = int(entry.told_s * 1000)
                if not self._insist.do(partial(self._scribe.write, entry.event, at_ms=at_ms)):
                    return
            if not self._insist.do(self._scribe.flush):
                return
            if entries:
                self._at = {"told": entries[-1].id, "plans": self._scribe.num_plans}
                self._journal.put(self.CURSOR, self._at)
            elif is_last:
                return
            else:
                self._is_over.wait(LOOK_EVERY_S)
