"""The store of promotions in progress: in the pool's database, or in a file of this home."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from ringmaster.flows import settings
from ringmaster.tasks.promotion.moves import MoveLog
from ringmaster.tasks.storage.database import Database, file_url


@contextmanager
def open_move_log() -> Iterator[MoveLog]:
    """Yields the log of alias moves that were begun and not finished; all machines of a pool share it."""
    pool = settings.pool()
    with closing(Database(pool.database if pool else file_url(settings.home() / "promotions.db"))) as database:
        yield MoveLog(database)
