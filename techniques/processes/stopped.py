"""Detects processes of this machine that a signal has stopped (SIGSTOP): they neither end nor report an error.

A process that computes, swaps or waits for a file is never in this state, however long that takes. When the whole
machine is suspended, or the observer is stopped with the observed, no time passes here.
"""

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

VARIABLE = "RINGMASTER_STOPPED_S"
STOPPED_S = 15.0  # after which a process that stays stopped counts as hung; a person stops one for a moment at most
LOOKS = 3  # during that time


def stopped_s() -> float:
    """Returns the seconds in RINGMASTER_STOPPED_S after which a stopped process counts as hung; 15 by default."""
    text = os.environ.get(VARIABLE)
    try:
        seconds = STOPPED_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{VARIABLE}={text} is not a number of seconds above 0. To fix: as in {STOPPED_S:g}")
    return seconds


def stopped_now() -> dict[int, int]:
    """Returns the session of each process that is stopped, by process id. A debugger's stop does not count."""
    sessions = {}
    for process in psutil.process_iter(["status"]):
        if process.info["status"] == psutil.STATUS_STOPPED:
            with suppress(ProcessLookupError):  # it has just ended
                sessions[process.pid] = os.getsid(process.pid)
    return sessions


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped now. A debugger's stop does not count."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


class StoppedProcesses:
    """Detects which of some processes stay stopped.

    after_s: seconds after which a stopped process counts as hung; by default those of the environment.
    clock: seconds that do not pass while the machine is suspended.
    """

    def __init__(self, *, after_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.after_s, self._clock = stopped_s() if after_s is None else after_s, clock
        self._since_s: dict[int, float] = {}
        self._looked_s = clock()

    @property
    def look_every_s(self) -> float:
        """The interval of the checks."""
        return self.after_s / LOOKS

    def is_due(self) -> bool:
        """Returns whether it is time for the next check."""
        return self._clock() - self._looked_s >= self.look_every_s

    def among(self, pids: Iterable[int]) -> set[int]:
        """Returns the processes that stay stopped, or that lead a session of which another process does."""
        now_s, sessions = self._clock(), stopped_now()
        stopped = {*sessions, *sessions.values()}
        is_blind = now_s - self._looked_s > self.after_s  # this process was stopped, too
        self._looked_s = now_s
        before = {} if is_blind else self._since_s
        self._since_s = {pid: before.get(pid, now_s) for pid in pids if pid in stopped}
        return {pid for pid, since_s in self._since_s.items() if now_s - since_s >= self.after_s}
