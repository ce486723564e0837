"""Identities of processes, by which one detects at once that another process on the same machine has ended."""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ringmaster.codec import to_json
from ringmaster.files import write_atomically

PROC = Path("/proc")
UNKNOWN = ""
KILL_TIMEOUT_S = 20.0  # SIGKILL takes a moment, longer on a busy machine
READY_FILE = "RINGMASTER_READY_FILE"
"""Environment variable that names the file in which a service with `says_ready` reports that it is ready."""


def own_process() -> str:
    """Returns the identity of this process: machine and boot, PID namespace, PID and start time."""
    machine, born = _machine(), _born(os.getpid())
    return UNKNOWN if UNKNOWN in (machine, born) else f"{machine}/{os.getpid()}/{born}"


def has_ended(where: str) -> bool:
    """Returns whether that process has ended; False if it cannot be determined because it is on another machine."""
    machine, _, rest = where.rpartition("/")
    machine, _, pid = machine.rpartition("/")
    if not machine or machine != _machine():
        return False
    if (born := _born(int(pid))) != UNKNOWN:
        return born != rest
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it exists, but its identity may not be read
    return True  # a zombie, until its parent waits for it


def identity(pid: int) -> str:
    """Returns a text that distinguishes a process from all others with its PID: the machine's boot id and its start
    time.

    The text is empty if there is no such process, or if it has ended. It holds no clock time, so that a change of the
    clock does not change the identity of a process.
    """
    born = _born(pid)
    return UNKNOWN if born == UNKNOWN else f"{boot_id()}:{born}"


def boot_id() -> str:
    """Returns what identifies this boot of the machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Returns what identifies the PID namespace of this process within this boot."""
    return str((PROC / "self/ns/pid").readlink())


def _machine() -> str:
    try:
        return f"{boot_id()}:{pid_namespace()}"
    except OSError:
        return UNKNOWN


def _born(pid: int) -> str:
    """Returns the start time in clock ticks since boot; unknown if the process does not exist or has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return UNKNOWN
    fields = text.rpartition(")")[2].split()  # the process name before it may hold any character
    return UNKNOWN if fields[0] in "ZX" else fields[19]


def own_row() -> dict[str, Any]:
    """Returns what a table has of the process that holds one of its rows, with a token that no other holder has."""
    pid = os.getpid()
    born_s = psutil.Process(pid).create_time()
    return {"token": uuid.uuid4().hex, "host": platform.node(), "pid": pid, "born_s": born_s}


def runs_here(pid: int, *, born_s: float) -> bool:
    """Returns whether the process of this machine with that number, which began at that time, still runs."""
    try:
        process = psutil.Process(pid)
        is_the_same = abs(float(process.create_time()) - float(born_s)) < 1.0
        return is_the_same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


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
        self.signal(signal.SIGCONT, group=group)  # one that is stopped obeys nothing else before SIGKILL
        in_order = self.wait(grace_s)
        if not in_order:
            self.signal(signal.SIGKILL, group=group)
            self.wait(max(grace_s, KILL_TIMEOUT_S))
        return in_order


def say_ready() -> None:
    """Reports to the supervisor of this process that it is ready: it leads, or serves."""
    file, me = os.environ.pop(READY_FILE, None), ProcessId.of(os.getpid())
    if file is not None and me is not None:
        write_secret(Path(file), json.dumps(to_json(me)))


def write_secret(file: Path, text: str) -> None:
    """Atomically writes a file that only its owner can read."""
    write_atomically(file, text.encode(), mode=0o600)
