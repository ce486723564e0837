"""A database that carries out many writes of a thread in one transaction.

A transaction costs round trips, the lock of all writers and a sync of the disk, and hundreds of segments may start or
report at once. The writes that have no result are therefore put off while a thread is inside `together`. They are
carried out in their order, all or none, before that thread reads or writes anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Connection

from ringmaster.tasks.storage.database import Database, JoinableWrite

T = TypeVar("T")

Act = Callable[[Connection], object]


class BatchingDatabase(Database):
    """The same database, whose `write_later` and `insert_later` wait inside `together`.

    A process that dies inside `together` has carried out none of the writes that waited. What it does meanwhile must
    therefore not be visible to others except through this database. After an exception inside `together`, the writes
    that wait are dropped as well.
    """

    def __init__(self, database: Database) -> None:
        self.url = database.url
        self._database, self._mine = database, threading.local()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Puts off the writes of this thread; carries them out at the end."""
        assert self._waiting is None, "`together` is not nested"
        self._mine.waiting = []
        try:
            yield
            self.flush()
        finally:
            self._mine.waiting = None

    def flush(self) -> None:
        """Carries out the writes that wait, in one transaction."""
        if self._waiting:
            self.write(lambda connection: None)

    def write_later(self, act: Act) -> None:
        """See `Database.write_later`."""
        waiting = self._waiting
        if waiting is None:
            self._database.write(act)
        elif not (waiting and isinstance(last := waiting[-1], JoinableWrite) and last.join(act)):
            waiting.append(act)

    def write(self, act: Callable[[Connection], T]) -> T:
        """Runs `act` in a write transaction, after the writes that wait; returns its result."""
        waiting = self._waiting
        if not waiting:
            return self._database.write(act)
        self._mine.waiting = []

        def all_of_them(connection: Connection) -> T:
            for each in waiting:
                each(connection)
            return act(connection)

        return self._database.write(all_of_them)

    def read(self, act: Callable[[Connection], T]) -> T:
        """Carries out the writes that wait, then runs `act` in a read transaction; returns its result."""
        self.flush()
        return self._database.read(act)

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    @property
    def _waiting(self) -> list[Act] | None:
        """The writes of this thread that wait; None outside of `together`."""
        waiting: list[Act] | None = getattr(self._mine, "waiting", None)
        return waiting
