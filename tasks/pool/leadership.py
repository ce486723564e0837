"""Who leads a pool: of all executor processes one, and no two of them ever write as its leader.

The row in the database counts its owners (the epoch) and the owner's beats. No clocks are compared: a candidate takes
over when it has seen no beat for a while by its own clock, or at once where it sees that the leader's process, on the
same machine, has ended. Whoever was taken for dead and lives after all, frozen or
cut off for a minute, finds another epoch in the very transaction in which it wants to write, and writes nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.schema import EXECUTOR
from ringmaster.tasks.pool.whereabouts import has_ended, own_whereabouts

T = TypeVar("T")

BEAT_EVERY_S = 3.0
SILENT_S = 15.0  # without a beat, after which another one takes over
BLIND_S = 6.0  # between two looks, after which nothing was seen that could be called a silence
NOBODY = ""
ROW = EXECUTOR.c.id == 1


class Deposed(SQLAlchemyError):
    """Another executor leads: this process must end, and has not written what it wanted to."""


class Leadership:
    """One process's claim to lead. clock: monotonic seconds. where, has_ended: what this process says of itself, and
    whether another one that said so has ended.

    `claim` until it says True; from then on `beat` every `BEAT_EVERY_S`, and write through `guarded` alone.
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
        self._me = f"{uuid.uuid4().hex} {own_whereabouts() if where is None else where}"
        self._epoch = 0
        self._seen: tuple[int, int] | None = None  # the epoch and the beats of the one who leads
        self._since_s = self._looked_s = clock()

    @property
    def epoch(self) -> int:
        """Of this leader; 0 before it leads."""
        return self._epoch

    def claim(self) -> bool:
        """Takes the lead where nobody has it, or where its owner has been silent for long; returns whether it did."""
        found = self._database.read(lambda connection: connection.execute(select(EXECUTOR).where(ROW)).one_or_none())
        now_s = self._clock()
        is_free = found is None or found.owner == NOBODY or self._has_ended(found.owner.partition(" ")[2])
        seen = None if found is None else (int(found.epoch), int(found.beats))
        # While the database was away nobody could beat: that silence was ours.
        if seen != self._seen or now_s - self._looked_s > BLIND_S:
            self._seen, self._since_s = seen, now_s
        self._looked_s = now_s
        if not is_free and now_s - self._since_s < self._silent_s:
            return False
        self._epoch = self._database.write(self._take)
        return self._epoch > 0

    def beat(self) -> bool:
        """Says that this leader lives; False once another one leads."""
        done = self._database.write(
            lambda connection: (
                connection.execute(
                    update(EXECUTOR).where(ROW, EXECUTOR.c.owner == self._me).values(beats=EXECUTOR.c.beats + 1)
                ).rowcount
            )
        )
        return bool(done)

    def resign(self, database: Database | None = None) -> None:
        """Leaves the lead to whoever wants it, without a silence. database: another way to the same, less patient."""
        mine = ROW & (EXECUTOR.c.owner == self._me)
        (database or self._database).write(
            lambda connection: connection.execute(update(EXECUTOR).where(mine).values(owner=NOBODY))
        )

    def guarded(self, database: Database, *, on_deposed: Callable[[], None]) -> Database:
        """The database as only a leader may write to it; its `write` calls `on_deposed` and raises Deposed else."""
        return _Guarded(database, check=self._check, on_deposed=on_deposed)

    def _take(self, connection: Connection) -> int:
        """The new epoch, or 0 where somebody was quicker."""
        row = connection.execute(select(EXECUTOR).where(ROW)).one_or_none()
        if row is None:
            connection.execute(insert(EXECUTOR).values(id=1, owner=self._me, epoch=1, beats=0))
            return 1
        if row.owner == self._me:  # this is tried again: it went through before
            return int(row.epoch)
        if (row.epoch, row.beats) != self._seen:
            return 0
        epoch = int(row.epoch) + 1
        connection.execute(update(EXECUTOR).where(ROW).values(owner=self._me, epoch=epoch, beats=0))
        return epoch

    def _check(self, connection: Connection) -> None:
        row = connection.execute(select(EXECUTOR.c.owner, EXECUTOR.c.epoch).where(ROW)).one_or_none()
        if row is None or (row.owner, row.epoch) != (self._me, self._epoch):
            raise Deposed("another executor leads this pool now")


class _Guarded(Database):
    """Another's connections, with a check before each write, in the same transaction."""

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
