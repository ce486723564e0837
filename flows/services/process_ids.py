"""Identities of processes, which tell a process from a later one with the same pid."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass

from ringmaster.tasks.process_identity import identity

KILL_PATIENCE_S = 20.0  # SIGKILL takes a moment, longer on a busy machine


@dataclass(frozen=True)
class ProcessId:
    """The identity of one process; a later process may have the same `pid`.

    pid: process id.
    born: id of the machine's boot, and the clock ticks from boot to the start of the process. It has no wall-clock
        time, so the identity stays valid when somebody sets the clock.
    """

    pid: int
    born: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Returns the identity of the process that has this pid now; None if there is none, or if it has ended."""
        born = identity(pid)
        return cls(pid, born) if born else None

    def lives(self) -> bool:
        """Returns whether the process still runs."""
        return ProcessId.of(self.pid) == self

    def open(self) -> int | None:
        """Returns a descriptor, for the caller to close, that is readable once the process ends; None if it ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.lives():  # checked after opening the descriptor, which cannot become another process's
            return descriptor
        os.close(descriptor)
        return None

    def signal(self, number: signal.Signals, *, group: bool = False) -> bool:
        """Sends a signal to this process alone, or to the process group that it leads; returns False if it ended."""
        descriptor = self.open()
        if descriptor is None:
            return False
        try:
            if group and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Waits until the process has ended; returns whether it has."""
        descriptor = self.open()
        if descriptor is None:
            return True
        try:
            ready, _, _ = select.select([descriptor], [], [], timeout_s)
        finally:
            os.close(descriptor)
        return bool(ready)

    def end(self, *, grace_s: float, group: bool = False) -> bool:
        """Sends SIGTERM, and SIGKILL after `grace_s` where the process still runs; returns whether SIGTERM was enough.

        group: whether to signal the whole process group that it leads.
        """
        self.signal(signal.SIGTERM, group=group)
        in_order = self.wait(grace_s)
        if not in_order:
            self.signal(signal.SIGKILL, group=group)
            self.wait(max(grace_s, KILL_PATIENCE_S))
        return in_order


def reap(pid: int, *, group: bool = False) -> int | None:
    """Returns the exit status of a child that has ended, or None where the process was no child of ours.

    group: whether to kill the rest of the process group that it led. A child that has ended keeps its pid, which is its
        group's id too, until it is reaped: no other process can be hit.
    """
    if group:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None
