"""Leader election among the executor processes of a pool, which guarantees that at most one of them writes.

The row in the database counts the changes of leader (the epoch) and the leader's heartbeats. No clocks are compared. A
candidate takes over when it has seen no heartbeat for `SILENT_S` by its own clock. It takes over at once if it sees
that the leader's process, on the same machine, has ended. A former leader that was only frozen or cut off for a minute
finds another epoch in the transaction in which it wants to write, and writes nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.process_identity import has_ended, own_process
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import EXECUTOR

T = TypeVar("T")

BEAT_EVERY_S = 3.0
SILENT_S = 15.0  # without a heartbeat, after which a candidate takes over
BLIND_S = 6.0  # between two checks, after which the silence is measured anew
NOBODY = ""
ROW = EXECUTOR.c.id == 1


class Deposed(SQLAlchemyError):
    """Raised when another controller leads: the write was not carried out, and this process must end."""


class Leadership:
    """One process's claim to lead.

    Call `claim` until it returns True. From then on, call `beat` every `BEAT_EVERY_S`, and write only through
    `guarded`.

    clock: monotonic seconds.
    where: the identity of this process.
    has_ended: returns whether the process with an identity has ended.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float] = time.monotonic,
        silent_s: float = SILENT_S,
        where: str | None = None,
        has_ended: Callable[[str], bool] = has_ended,
    ) -> None:
        self._database, self._clock, self._silent_s, self._has_ended = database, clock, silent_s, has_ended
        self._me = f"{uuid.uuid4().hex} {own_process() if where is None else where}"
        self._epoch = 0
        self._seen: tuple[int, int] | None = None  # the epoch and the heartbeats of the leader
        self._since_s = self._looked_s = clock()

    @property
    def epoch(self) -> int:
        """The epoch of this leader; 0 before it leads."""
        return self._epoch

    def claim(self) -> bool:
        """Takes the lead if nobody has it or the leader has been silent for `silent_s`; returns whether it did."""
        found = self._database.read(lambda connection: connection.execute(select(EXECUTOR).where(ROW)).one_or_none())
        now_s = self._clock()
        is_free = found is None or found.owner == NOBODY or self._has_ended(found.owner.partition(" ")[2])
        seen = None if found is None else (int(found.epoch), int(found.beats))
        # No leader could send heartbeats while the database was unreachable, so the silence is measured anew.
        if seen != self._seen or now_s - self._looked_s > BLIND_S:
            self._seen, self._since_s = seen, now_s
        self._looked_s = now_s
        if not is_free and now_s - self._since_s < self._silent_s:
            return False
        self._epoch = self._database.write(self._take)
        return self._epoch > 0

    def beat(self) -> bool:
        """Stores a heartbeat of this leader; returns False once another one leads."""
        done = self._database.write(
            lambda connection: (
                connection.execute(
                    update(EXECUTOR).where(ROW, EXECUTOR.c.owner == self._me).values(beats=EXECUTOR.c.beats + 1)
                ).rowcount
            )
        )
        return bool(done)

    def resign(self, database: Database | None = None) -> None:
        """Gives up the lead, so that a candidate can take over at once.

        database: another connection to the same database, with shorter timeouts.
        """
        mine = ROW & (EXECUTOR.c.owner == self._me)
        (database or self._database).write(
            lambda connection: connection.execute(update(EXECUTOR).where(mine).values(owner=NOBODY))
        )

    def guarded(self, database: Database, *, on_deposed: Callable[[], None]) -> Database:
        """Returns the database with the leader's write access.

        Once another process leads, `write` calls `on_deposed` and raises Deposed.
        """
        return _Guarded(database, check=self._check, on_deposed=on_deposed)

    def _take(self, connection: Connection) -> int:
        """Returns the new epoch, or 0 if another process was faster."""
        row = connection.execute(select(EXECUTOR).where(ROW)).one_or_none()
        if row is None:
            connection.execute(insert(EXECUTOR).values(id=1, owner=self._me, epoch=1, beats=0))
            return 1
        if row.owner == self._me:  # a retry of a transaction that was committed before
            return int(row.epoch)
        if (row.epoch, row.beats) != self._seen:
            return 0
        epoch = int(row.epoch) + 1
        connection.execute(update(EXECUTOR).where(ROW).values(owner=self._me, epoch=epoch, beats=0))
        return epoch

    def _check(self, connection: Connection) -> None:
        row = connection.execute(select(EXECUTOR.c.owner, EXECUTOR.c.epoch).where(ROW)).one_or_none()
        if row is None or (row.owner, row.epoch) != (self._me, self._epoch):
            raise Deposed("another controller leads this pool now")


class _Guarded(Database):
    """A database that checks the leadership before each write, in the same transaction."""

    def __init__(
        self, database: Database, *, check: Callable[[Connection], None], on_deposed: Callable[[], None]
    ) -> None:
        self.url = database.url
        self._database, self._check, self._on_deposed = database, check, on_deposed

    def write(self, act: Callable[[Connection], T]) -> T:
        def checked(connection: Connection) -> T:
            self._check(connection)
            return act(connection)

        try:
            return self._database.write(checked)
        except Deposed:
            self._on_deposed()
            raise

    def read(self, act: Callable[[Connection], T]) -> T:
        return self._database.read(act)

    def close(self) -> None:
        self._database.close()
