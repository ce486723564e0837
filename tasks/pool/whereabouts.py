"""Which process on which machine: so that whoever shares a machine with one that was killed need not wait for it."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
UNKNOWN = ""


def own_whereabouts() -> str:
    """Names the present process: its machine (since that was started), its namespace of ids, its id, when it began."""
    machine, born = _machine(), _born(os.getpid())
    return UNKNOWN if UNKNOWN in (machine, born) else f"{machine}/{os.getpid()}/{born}"


def has_ended(whereabouts: str) -> bool:
    """Whether that very process has ended; False where nobody can tell from here: it is on another machine."""
    machine, _, rest = whereabouts.rpartition("/")
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
        return False  # it is there, and hides from us what it is
    return True  # what is left of it until somebody buries it


def identity(pid: int) -> str:
    """What tells a process from all others that have its id: the machine's boot, and when it began; empty where there
    is no such process, or one that has ended.

    No clock is in it, so that a clock that is set does not make a stranger of a process.
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
    """In clock ticks since the machine was started; unknown where there is no such process, or one that has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return UNKNOWN
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return UNKNOWN if fields[0] in "ZX" else fields[19]
