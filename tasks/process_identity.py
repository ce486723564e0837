"""Identities of processes, by which one detects at once that another process on the same machine has ended."""

import os
import platform
import uuid
from pathlib import Path
from typing import Any

import psutil

PROC = Path("/proc")
UNKNOWN = ""


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
    """Returns a text that tells a process from all others with its PID: the machine's boot id and its start time.

    The text is empty if there is no such process, or if it has ended. It holds no clock time, so that a change of the
    clock does not change the identity of a process.
    """
    born = _born(pid)
    return UNKNOWN if born == UNKNOWN else f"{(PROC / 'sys/kernel/random/boot_id').read_text().strip()}:{born}"


def _machine() -> str:
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{(PROC / 'self/ns/pid').readlink()}"
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
