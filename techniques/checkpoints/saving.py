"""Checkpoints that are written in the background while training continues.

When a save is due, every rank copies its part of the state (the *stall*), and a thread writes, syncs and checksums the
copy. This needs no process group of its own: the ranks exchange the state of the save with the sums of every step.

    all ranks    copy, write to a temporary place     send ENDED (and FAILED) once written
    rank 0       publish, or drop                     when all have ended; sends CLOSED once that is done
    all ranks    report, free for the next save       when rank 0 has closed

So a rank never waits for another, and a crash at any moment leaves the published checkpoints intact. The last save of a
segment works in the same way but without a copy, and the ranks wait for it.

Where a disk or store takes nothing (it is full, over its quota, read-only or away), training on would only lose more
steps at the next fault. The ranks therefore wait with their state in memory, and try again until it is written:
no more than one interval is ever repeated.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ringmaster.errors import CheckpointError, ObjectStoreUnavailable
from ringmaster.files import write_patience_s
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore, RankPieces, WritePieces
from ringmaster.techniques.checkpoints.state import HostCopies
from ringmaster.techniques.checkpoints.storage import Block
from ringmaster.techniques.processes.gang_events import CheckpointFailed, CheckpointSaved
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.processes.reporter import BEAT_EVERY_S, Reporter

THREAD_NAME = "checkpoint"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0


class SaveVotes(NamedTuple):
    """The state of a rank's current save, to be summed over the ranks."""

    ended: float = 0.0
    failed: float = 0.0
    closed: float = 0.0
    num_bytes: float = 0.0  # bytes that the rank has written so far


class CheckpointSource(Protocol):
    """What checkpoints store of a job on this rank: the common interface of a `Trainer` and a member of a group."""

    next_step: int

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """Returns the pieces that this rank writes into a checkpoint of the present state."""

    def checkpoint_meta(self) -> dict[str, Any]:
        """Returns the metadata of the job that a checkpoint stores."""

    def after_publish(self, step: int, *, is_last: bool) -> None:
        """Follows the publication of the checkpoint of `step`. Called on rank 0."""


def takes_nothing(fault: OSError | None) -> bool:
    """Returns whether a fault of a disk or store may pass: it is full, read-only or away. True for no fault."""
    return fault is None or fault.errno in FULL or isinstance(fault, (CheckpointError, ObjectStoreUnavailable))


class WriteRetries:
    """What all ranks of a gang do between two tries to write: they report the cause and wait, for a limited time."""

    def __init__(self, ranks: RankContext, reporter: Reporter, *, gives_up: Callable[[], bool]) -> None:
        self._ranks, self._reporter, self._gives_up = ranks, reporter, gives_up
        self._timeout_s = write_patience_s()
        self._since_s, self._wait_s = time.monotonic(), FIRST_RETRY_S
        self._last_message = ""

    def wait(self, error: OSError, *, step: int) -> bool:
        """Waits until the next try; returns whether there is one, as a command to a rank (`gives_up`) ends the wait.

        All ranks call it together. Raises `error` on all of them once they have waited for `write_patience_s`.
        """
        message = (
            f"{error}. The job waits with its state in memory, and tries again for {self._timeout_s / 60:.0f} min. "
            "To fix: free space there, or make it writable"
        )
        if message != self._last_message:
            self._last_message = message
            self._reporter.send(CheckpointFailed(step=step, message=message, waits=True))
        begun_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            votes = (self._gives_up(), now_s - self._since_s >= self._timeout_s, now_s - begun_s >= self._wait_s)
            is_over, is_late, is_due = (number > 0 for number in self._ranks.sum(list(map(float, votes))))
            if is_over:
                return False
            if is_late:
                raise error
            if is_due:
                self._wait_s = min(2 * self._wait_s, LONGEST_RETRY_S)
                return True
            self._reporter.beat()
            time.sleep(BEAT_EVERY_S)


class Saver:
    """The saves of one segment on one rank, one at a time; all ranks begin and end them at the same steps.

    saved_step: the step of the newest checkpoint.
    has_failed: whether the last save failed, so that the state since then is in memory alone.
    """

    def __init__(
        self, saved: CheckpointSource, store: CheckpointStore, reporter: Reporter, *, ranks: RankContext
    ) -> None:
        self._saved, self._store, self._reporter, self._ranks = saved, store, reporter, ranks
        self._copies = HostCopies(is_pinned=ranks.device.type == "cuda")
        self._save: _Save | None = None
        self.saved_step, self.has_failed = saved.next_step, False

    @property
    def is_idle(self) -> bool:
        """Whether no save is in progress."""
        return self._save is None

    def votes(self) -> SaveVotes:
        """Returns the values that this rank contributes to the sums of this step."""
        return self._save.votes() if self._save is not None else SaveVotes()

    def begin(self) -> None:
        """Copies the present state and starts to write it while training continues."""
        self._begin(self._copies)

    def begin_last(self) -> None:
        """Starts to write the state without a copy, so that it must not change before `finish`.

        A save in progress is finished first.
        """
        self.finish()
        self._begin(None)

    def finish_last(self, *, gives_up: Callable[[], bool]) -> bool:
        """Waits until the last save is published on all ranks, and writes it again for as long as it fails.

        Returns False where a command (`gives_up`) has ended the wait: the newest checkpoint is then that of
        `saved_step`. Raises CheckpointError on every rank where any rank could not write for too long.
        """
        retries = WriteRetries(self._ranks, self._reporter, gives_up=gives_up)
        had_failed = self.has_failed
        while True:
            if self._save is None and self.has_failed:
                self._begin(None)
            try:
                self.finish()
            except CheckpointError as error:
                self.has_failed = had_failed = True
                if not retries.wait(error, step=self._saved.next_step):
                    return False
            else:
                if had_failed:
                    self._reporter.send(CheckpointSaved(step=self.saved_step))
                return True

    def _begin(self, copies: HostCopies | None) -> None:
        assert self._save is None
        started_s = time.perf_counter()
        step, meta = self._saved.next_step, self._saved.checkpoint_meta()
        save = _Save(step=step, leads=self._ranks.rank == 0, started_s=started_s, is_waited_for=copies is None)
        pieces = save.counting(self._saved.pieces(copies=copies))
        save.publish = lambda: self._publish(step, meta, is_last=copies is None)
        save.drop = lambda: self._store.drop(step)
        save.start(lambda: self._store.write_part(step, pieces))
        save.stall_s = time.perf_counter() - started_s
        self._save = save

    def _publish(self, step: int, meta: Mapping[str, Any], *, is_last: bool) -> None:
        self._store.publish(step, meta)
        self._saved.after_publish(step, is_last=is_last)

    def follow(self, sums: SaveVotes) -> None:
        """Processes the sums over all ranks at a step: advances the save in progress, or completes it."""
        save = self._save
        if save is None:
            return
        if sums.closed:
            self._save = None
            self._tell(save, has_failed=sums.failed > 0)
        elif sums.ended == self._ranks.num_ranks:
            save.close(has_failed=sums.failed > 0)

    def finish(self) -> None:
        """Waits until the save in progress, if any, is published or dropped on all ranks.

        Raises CheckpointError where it was a last save that a rank could not write. Reports that this rank is alive as
        long as any rank makes progress, so that a hanging disk counts as a hanging rank.
        """
        value = None
        while self._save is not None:
            self._save.wait(BEAT_EVERY_S)
            sums = SaveVotes(*self._ranks.sum(list(self.votes())))
            if sums != value:
                self._reporter.beat()
            value = sums
            self.follow(sums)

    def _tell(self, save: _Save, *, has_failed: bool) -> None:
        self.has_failed = has_failed
        self.saved_step = self.saved_step if has_failed else save.step
        if has_failed:
            error = self._store.failed(save.step, save.fault)
            if save.is_waited_for:
                raise error
            self._reporter.send(CheckpointFailed(step=save.step, message=str(error)))
        elif not save.is_waited_for:
            seconds = time.perf_counter() - save.started_s
            self._reporter.send(CheckpointSaved(step=save.step, seconds=seconds, stall_s=save.stall_s))


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
        """Returns the same pieces, with a count of the bytes that are written of them."""

        def passing(blocks: Iterable[Block]) -> Iterator[Block]:
            for block in blocks:
                yield block
                self._num_bytes += len(block)

        def pieces(file: str) -> RankPieces:
            written = write(file)
            return replace(written, blocks=passing(written.blocks))

        return pieces

    def wait(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def votes(self) -> SaveVotes:
        thread = self._thread
        is_done = thread is not None and not thread.is_alive()
        if thread is not None and is_done:
            self.fault = self.fault or thread.fault()
        failed = float(is_done and (self.fault is not None or self._has_failed))
        if not self._closing:
            return SaveVotes(ended=float(is_done), failed=failed, num_bytes=self._num_bytes)
        return SaveVotes(failed=failed, closed=float(is_done))

    def close(self, *, has_failed: bool) -> None:
        """Ends the save once all ranks have written or failed: rank 0 publishes or drops it, the others wait."""
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
    """An action in a daemon thread, which stores the exception that the action raises."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(name=THREAD_NAME, daemon=True)
        self._action = action
        self._raised: BaseException | None = None

    def run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - raised again, or reported, by the thread that trains
            self._raised = error

    def fault(self) -> OSError | None:
        """Returns the OSError of the disk or store, if any; raises any other exception of the action."""
        if self._raised is None or isinstance(self._raised, OSError):
            return self._raised
        raise self._raised
