"""Checkpoints that are written while training goes on.

When a save is due every rank copies what it holds (the *stall*), and a thread writes, syncs and checksums the copy. No
process group of its own is needed: what the ranks have to know of each other travels with the sums of every step.

    all ranks    copy, write aside        ask ENDED (and FAILED) once written
    rank 0       publish, or drop         when all have ended; asks CLOSED once that is done
    all ranks    tell, free for the next  when rank 0 has closed

A rank thus never waits for another, and a crash at any moment leaves what was published before. The last save of a
segment takes the same way without a copy, and is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ringmaster.techniques.engine.checkpoint import CheckpointStore, Pieces, WritePieces
from ringmaster.techniques.engine.places import Block
from ringmaster.techniques.engine.ranks import Ranks
from ringmaster.techniques.engine.reporter import BEAT_EVERY_S, Teller
from ringmaster.techniques.engine.state import HostCopies

THREAD_NAME = "checkpoint"


class Asks(NamedTuple):
    """What a rank says of the save under way, to be summed over the ranks."""

    ended: float = 0.0
    failed: float = 0.0
    closed: float = 0.0
    num_bytes: float = 0.0  # that it has written so far


class Saved(Protocol):
    """A job's training state on this rank: what `Trainer` and a member of a group have in common."""

    next_step: int

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """What this rank writes into a checkpoint of the state as it is."""

    def checkpoint_meta(self) -> dict[str, Any]:
        """What a checkpoint says of its job."""


class Saver:
    """The saves of one segment on one rank, one at a time; all ranks begin, follow and finish at the same steps."""

    def __init__(self, saved: Saved, store: CheckpointStore, reporter: Teller, *, ranks: Ranks) -> None:
        self._saved, self._store, self._reporter, self._ranks = saved, store, reporter, ranks
        self._copies = HostCopies(is_pinned=ranks.device.type == "cuda")
        self._save: _Save | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way."""
        return self._save is None

    def asks(self) -> Asks:
        """What this rank has to say at this step."""
        return self._save.asks() if self._save is not None else Asks()

    def begin(self) -> None:
        """Copies the state as it is now, and has it written while training goes on."""
        self._begin(self._copies)

    def begin_last(self) -> None:
        """Has the state written as it is: it must not change before `finish`. A save under way is waited for first."""
        self.finish()
        self._begin(None)

    def save_at_once(self) -> float:
        """Saves the state and waits until it is durable; returns the seconds. A save under way is waited for first.

        Raises CheckpointError on every rank where any could not write.
        """
        self.finish()
        started_s = time.perf_counter()
        self.begin_last()
        self.finish()
        return time.perf_counter() - started_s

    def _begin(self, copies: HostCopies | None) -> None:
        assert self._save is None
        started_s = time.perf_counter()
        step, meta = self._saved.next_step, self._saved.checkpoint_meta()
        save = _Save(step=step, leads=self._ranks.rank == 0, started_s=started_s, is_waited_for=copies is None)
        pieces = save.counting(self._saved.pieces(copies=copies))
        save.publish = lambda: self._store.publish(step, meta)
        save.drop = lambda: self._store.drop(step)
        save.start(lambda: self._store.write_part(step, pieces))
        save.stall_s = time.perf_counter() - started_s
        self._save = save

    def follow(self, sums: Asks) -> None:
        """Takes what all ranks said at a step, and does what follows from it."""
        save = self._save
        if save is None:
            return
        if sums.closed:
            self._save = None
            self._tell(save, has_failed=sums.failed > 0)
        elif sums.ended == self._ranks.num_ranks:
            save.close(has_failed=sums.failed > 0)

    def finish(self) -> None:
        """Waits for the save under way, if any, to be published or dropped on all ranks.

        Raises CheckpointError where it was a last one, which any rank could not write. Says that the rank is alive for
        as long as any rank gets on: a disk that hangs is a rank that hangs.
        """
        said = None
        while self._save is not None:
            self._save.wait(BEAT_EVERY_S)
            sums = Asks(*self._ranks.sum(list(self.asks())))
            if sums != said:
                self._reporter.beat()
            said = sums
            self.follow(sums)

    def _tell(self, save: _Save, *, has_failed: bool) -> None:
        if has_failed:
            error = self._store.failed(save.step, save.fault)
            if save.is_waited_for:
                raise error
            self._reporter.send("checkpoint_failed", step=save.step, message=str(error))
        elif not save.is_waited_for:
            seconds = time.perf_counter() - save.started_s
            self._reporter.send("checkpoint", step=save.step, seconds=seconds, stall_s=save.stall_s)


class _Save:
    """One save, as this rank sees it."""

    publish: Callable[[], None]
    drop: Callable[[], None]

    def __init__(self, *, step: int, leads: bool, started_s: float, is_waited_for: bool) -> None:
        self.step, self.started_s, self.stall_s = step, started_s, 0.0
        self.is_waited_for = is_waited_for
        self._num_bytes = 0
        self._leads = leads
        self._thread: _Background | None = None
        self._closing = False
        self._has_failed = False
        self.fault: BaseException | None = None

    def start(self, action: Callable[[], None]) -> None:
        self._thread = _Background(action)
        self._thread.start()

    def counting(self, write: WritePieces) -> WritePieces:
        """The same pieces; what is written of them is counted."""

        def passing(blocks: Iterable[Block]) -> Iterator[Block]:
            for block in blocks:
                yield block
                self._num_bytes += len(block)

        def pieces(file: str) -> Pieces:
            written = write(file)
            return replace(written, blocks=passing(written.blocks))

        return pieces

    def wait(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def asks(self) -> Asks:
        thread = self._thread
        is_done = thread is not None and not thread.is_alive()
        if thread is not None and is_done:
            self.fault = self.fault or thread.fault()
        failed = float(is_done and (self.fault is not None or self._has_failed))
        if not self._closing:
            return Asks(ended=float(is_done), failed=failed, num_bytes=self._num_bytes)
        return Asks(failed=failed, closed=float(is_done))

    def close(self, *, has_failed: bool) -> None:
        """All ranks have written, or failed to: rank 0 makes an end of it, the others wait for its word."""
        self._closing, self._has_failed = True, has_failed
        self._thread = None
        if self._leads:
            self.start(self.drop if has_failed else self._publish_or_drop)

    def _publish_or_drop(self) -> None:
        try:
            self.publish()
        except OSError:
            self.drop()
            raise


class _Background(threading.Thread):
    """An action in a thread that does not outlive the process, and whose faults are not lost."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(name=THREAD_NAME, daemon=True)
        self._action = action
        self._raised: BaseException | None = None

    def run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - raised again, or told, by the thread that trains
            self._raised = error

    def fault(self) -> OSError | None:
        """What a disk or a store did not let it do; what else went wrong is raised here."""
        if self._raised is None or isinstance(self._raised, OSError):
            return self._raised
        raise self._raised
