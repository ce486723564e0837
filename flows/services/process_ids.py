"""Processes that another process started, named so that nobody else is ever taken for them."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass

from ringmaster.tasks.pool.whereabouts import identity

KILL_PATIENCE_S = 20.0  # SIGKILL takes a moment, and more on a machine that is busy


@dataclass(frozen=True)
class ProcessId:
    """One very process: `pid` alone may be another's later. born: the machine's boot, and ticks from there.

    No clock is in it, so that a clock that is set does not make a stranger of a process.
    """

    pid: int
    born: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None where there is none, or one that has ended already."""
        born = identity(pid)
        return cls(pid, born) if born else None

    def lives(self) -> bool:
        """Whether it still runs."""
        return ProcessId.of(self.pid) == self

    def open(self) -> int | None:
        """A descriptor that becomes readable when the process ends, for the caller to close; None where it has."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.lives():  # looked at with the descriptor in hand: from here on it cannot be another's
            return descriptor
        os.close(descriptor)
        return None

    def signal(self, number: signal.Signals, *, group: bool = False) -> bool:
        """Sends a signal to this process and nobody else, or to the group that it leads; False where it has ended."""
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
        """Waits until it has ended, and returns whether it has."""
        descriptor = self.open()
        if descriptor is None:
            return True
        try:
            ready, _, _ = select.select([descriptor], [], [], timeout_s)
        finally:
            os.close(descriptor)
        return bool(ready)

    def end(self, *, grace_s: float, group: bool = False) -> bool:
        """SIGTERM, and SIGKILL to what has not ended after `grace_s`; returns whether SIGTERM was enough.

        group: whether all of the group that it leads is meant.
        """
        self.signal(signal.SIGTERM, group=group)
        in_order = self.wait(grace_s)
        if not in_order:
            self.signal(signal.SIGKILL, group=group)
            self.wait(max(grace_s, KILL_PATIENCE_S))
        return in_order


def reap(pid: int, *, group: bool = False) -> int | None:
    """The exit status of a child that has ended, or None of one that was another's; what is left of its group ends.

    A child that has ended keeps its number, which is its group's too, until here: nobody else is killed.
    """
    if group:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None
