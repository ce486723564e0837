"""The leases of a machine's devices on disk, so that processes that share the machine never share a device.

A lease identifies its holder's process by pid and start time. The leases of a process that has ended are void. The
processes that a holder started cannot outlive it (the fork server ensures that), so the devices of a void lease are
free.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ringmaster.errors import DatabaseFileError
from ringmaster.model_lineage.sqlite_files import fault_of
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.process_identity import identity

SCHEMA = """
CREATE TABLE IF NOT EXISTS device_leases (
    device TEXT PRIMARY KEY, holder TEXT NOT NULL, pid INTEGER NOT NULL, born TEXT NOT NULL, since_s REAL NOT NULL
)
"""


def leases_of(home: Path, cluster: Cluster) -> FileLeases:
    """Returns the ledger of this machine, for the devices of `cluster`.

    Each machine has its own file, as `home` may be on storage that machines share, whose processes are unknown here.
    """
    units = {name: cluster.device(*place).units() for place, name in cluster.lease_names().items()}
    return FileLeases(home / "machines" / (platform.node() or "localhost") / "leases.db", units=units)


class FileLeases:
    """The leases of one machine's devices, named "node:kind:number". Safe between threads and between processes.

    units: what each device consists of, which decides whether devices of two processes are the same: processes see
        different GPUs under one number, and divide the cores into different numbers of slots.
    """

    def __init__(self, file: Path, *, units: Mapping[str, Collection[str]] | None = None) -> None:
        self._units = units or {}
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        try:
            with self._transaction() as db:
                db.execute(SCHEMA)
        except sqlite3.Error as error:
            if fault := fault_of(file, contents="who holds which device of this machine now"):
                raise DatabaseFileError([fault]) from error
            raise

    def take(self, devices: Sequence[str], *, holder: str) -> bool:
        """Leases all of `devices` to `holder`, or none if one is leased already. Returns whether it did."""
        return self.take_each([devices], holder=holder)[0]

    def take_each(self, gangs: Sequence[Sequence[str]], *, holder: str) -> list[bool]:
        """Leases the devices of each gang as `take` does, in one transaction. Returns which were leased."""
        pid = os.getpid()
        born = identity(pid)
        with self._transaction() as db:
            busy, are_taken = {*self._held(db)}, []
            for gang in map(self._units_of, gangs):
                are_taken.append(busy.isdisjoint(gang))
                if are_taken[-1]:
                    busy.update(gang)
                    rows = [(unit, holder, pid, born, time.time()) for unit in gang]
                    db.executemany("INSERT OR REPLACE INTO device_leases VALUES (?, ?, ?, ?, ?)", rows)
        return are_taken

    def give_back(self, devices: Sequence[str]) -> None:
        """Ends this process's leases of `devices`."""
        with self._transaction() as db:
            rows = [(unit, os.getpid()) for unit in self._units_of(devices)]
            db.executemany("DELETE FROM device_leases WHERE device = ? AND pid = ?", rows)

    def held(self) -> dict[str, str]:
        """Returns the holder of each device that is leased now, by the names of `units`."""
        with self._transaction() as db:
            held = self._held(db)
        if not self._units:
            return held
        return {name: held[unit] for name, units in self._units.items() for unit in units if unit in held}

    def _units_of(self, devices: Sequence[str]) -> list[str]:
        return [unit for device in devices for unit in self._units.get(device, (device,))]

    def processes(self) -> dict[str, int]:
        """Returns the process id of each holder of a device that is leased now."""
        with self._transaction() as db:
            rows = db.execute("SELECT holder, pid, born FROM device_leases").fetchall()
        return {holder: pid for holder, pid, born in rows if identity(pid) == born}

    def _held(self, db: sqlite3.Connection) -> dict[str, str]:
        rows = db.execute("SELECT device, holder, pid, born FROM device_leases").fetchall()
        return {device: holder for device, holder, pid, born in rows if identity(pid) == born}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._file, isolation_level=None, timeout=30)) as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
