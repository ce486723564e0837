"""A running command: starts it, reads its events, stops it, and explains its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from ringmaster.techniques.external import checkpoints
from ringmaster.techniques.external.account import Account
from ringmaster.techniques.external.events import Done, Failed
from ringmaster.techniques.external.keeper import Kept
from ringmaster.techniques.external.protocol import (
    PREEMPTED_STATUS,
    Report,
    environment,
    free_port,
    words_of,
    write_order,
)
from ringmaster.techniques.processes.events import OutcomeStatus
from ringmaster.techniques.processes.gang import num_out_of_memory_kills
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import Reporter

LAST_WORDS = 2000  # characters of the log that are searched for the cause of an unreported end


ERRORS = {
    OutcomeStatus.OUT_OF_MEMORY: MemoryError,
    OutcomeStatus.INVALID: ValueError,
    OutcomeStatus.CRASHED: RuntimeError,
}


class Child:
    """The command of an order, on the devices of its gang.

    Entering the context starts the command; leaving it ends the command in any case.

    export_to: the folder into which the command writes the finished model.
    """

    def __init__(self, order: GangOrder, reporter: Reporter, *, mode: str, root: Path) -> None:
        self.account = Account(order, reporter, mode=mode, root=root)
        self._order, self._reporter, self._mode, self._root = order, reporter, mode, root
        self._folder = Path(order.folder).resolve()
        self.export_to = self._folder / "export"
        self._seen_peak_bytes = 0
        self._is_terminated = False
        self._num_kills_before = num_out_of_memory_kills()

    def __enter__(self) -> Self:
        shutil.rmtree(self.export_to, ignore_errors=True)
        self.export_to.mkdir(parents=True)
        order_file, report_file, port = self._folder / "order.json", self._folder / "report", free_port()
        write_order(
            order_file,
            self._order,
            mode=self._mode,
            port=port,
            first_step=self.account.first_step,
            restore_from=self.account.restored_from,
            folders={"save_to": checkpoints.incoming(self._root), "export_to": self.export_to},
        )
        if cores := {core for slot in self._order.slots for core in slot.cores}:
            os.sched_setaffinity(0, cores)
        self._report = Report(report_file)
        self._kept = Kept(
            words_of(self._order, port=port),
            environment=environment(self._order, port=port, order_file=order_file, report_file=report_file),
            folder=self._folder,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.close()
        self._report.close()

    @property
    def peak_bytes(self) -> int:
        """The peak memory that the command reported.

        Without a report, it is the whole memory of a GPU; on CPU slots, the most that one process of the command held.
        """
        if self.account.reported_peak_bytes is not None:
            return self.account.reported_peak_bytes
        slot = self._order.slots[0]
        return slot.memory_bytes if slot.kind == "gpu" else self._seen_peak_bytes

    def rounds(self) -> Iterator[list[float]]:
        """Waits for messages to this rank and events of the command, again and again, until the command has ended.

        Each round processes the new events, and yields the seconds of the steps among them.
        """
        with woken_by_signals() as wake, selectors.DefaultSelector() as selector:
            for source in (wake, self._report, self._kept.channel, self._reporter):
                selector.register(source, selectors.EVENT_READ)
            while self._kept.status is None:
                selector.select()
                drain(wake)
                self._kept.hear()
                num_told = len(self.account.step_seconds)
                for event in self._report.events():
                    self.account.note(event)
                seconds = self.account.step_seconds[num_told:]
                if seconds:
                    self._seen_peak_bytes = max(self._seen_peak_bytes, _peak_bytes(self._kept.processes()))
                self.account.tell_steps(num_told, peak_bytes=self.account.reported_peak_bytes or self._seen_peak_bytes)
                yield seconds

    def terminate(self) -> None:
        """Asks the command, once, to write a checkpoint at its next step and end.

        In a trial the command does all that it does after the last step of a job.
        """
        if not self._is_terminated:
            self._is_terminated = True
            self._kept.signal(signal.SIGTERM)

    def ended(self) -> OutcomeStatus:
        """Returns how the command ended: done or preempted.

        Its events take precedence over its exit status, which launchers change. Raises MemoryError, ValueError or
        RuntimeError for the failure that it reported, or for the likely cause of its end.
        """
        end = self.account.end
        if isinstance(end, Failed):
            raise ERRORS[OutcomeStatus(end.kind)](end.message)
        if end is not None:
            return OutcomeStatus.DONE if isinstance(end, Done) else OutcomeStatus.PREEMPTED
        # SIGTERM itself may have killed a command that had not begun, or was between a checkpoint and its next step.
        if self._kept.status == PREEMPTED_STATUS or (self._is_terminated and self.account.is_saved):
            return OutcomeStatus.PREEMPTED
        if num_out_of_memory_kills() > self._num_kills_before:
            raise MemoryError("the kernel killed a process of the command for want of memory")
        raise RuntimeError(f"the command ended with status {self._kept.status} without saying done{self._last_words()}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._folder / "rank-0.log").read_text(errors="replace")[-LAST_WORDS:]
            if lines := [line.strip() for line in text.splitlines() if line.strip()]:
                return f"; the last line of its output: {lines[-1]}"
        return ""


@contextlib.contextmanager
def woken_by_signals() -> Iterator[int]:
    """Yields a file descriptor that becomes readable when a signal arrives, which ends a wait on descriptors."""
    wake, writer = os.pipe()
    for end in (wake, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(before)
        os.close(wake)
        os.close(writer)


def drain(wake: int) -> None:
    """Discards the numbers of the signals that arrived: the waiting code checks all its sources anyway."""
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)


def _peak_bytes(processes: list[int]) -> int:
    """The most memory that one of the processes has held; processes that have ended count as 0."""
    peaks = [0]
    for pid in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            peaks.append(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
    return max(peaks)
