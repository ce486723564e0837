"""Which device serves whom: a ledger on disk, so that no device is given twice by processes that share a machine.

A lease names the process that holds it by pid and start time; the leases of a process that has ended are void. What a
holder started cannot outlive it (the fork server sees to that), so a void lease's devices are free.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

SCHEMA = """
CREATE TABLE IF NOT EXISTS leases (
    device TEXT PRIMARY KEY, holder TEXT NOT NULL, pid INTEGER NOT NULL, born_s REAL NOT NULL, since_s REAL NOT NULL
)
"""


def leases_of(home: Path) -> Leases:
    """The ledger of this machine: a home may be on storage that others share, who know nothing of our processes."""
    return Leases(home / "machines" / (platform.node() or "localhost") / "leases.db")


class Leases:
    """The leases of one machine's devices, named "node:kind:index". Safe between threads and between processes."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        with self._transaction() as db:
            db.execute(SCHEMA)

    def take(self, devices: Sequence[str], *, holder: str) -> bool:
        """Leases all of `devices` to `holder`, or none of them where one is taken; returns which."""
        pid = os.getpid()
        born_s = psutil.Process(pid).create_time()
        with self._transaction() as db:
            taken = self._held(db)
            if any(device in taken for device in devices):
                return False
            db.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)",
                [(device, holder, pid, born_s, time.time()) for device in devices],
            )
        return True

    def give_back(self, devices: Sequence[str]) -> None:
        """Ends the leases of this process on `devices`."""
        with self._transaction() as db:
            db.executemany("DELETE FROM leases WHERE device = ? AND pid = ?", [(d, os.getpid()) for d in devices])

    def held(self) -> dict[str, str]:
        """The holder of each device that is leased now."""
        with self._transaction() as db:
            return self._held(db)

    def _held(self, db: sqlite3.Connection) -> dict[str, str]:
        rows = db.execute("SELECT device, holder, pid, born_s FROM leases").fetchall()
        return {device: holder for device, holder, pid, born_s in rows if _lives(pid, born_s)}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._file, isolation_level=None, timeout=30)) as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")


def _lives(pid: int, born_s: float) -> bool:
    """Whether the very process that took a lease still runs; a pid alone may be another's by now."""
    try:
        process = psutil.Process(pid)
        is_the_same = abs(float(process.create_time()) - born_s) < 1.0
        return is_the_same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
