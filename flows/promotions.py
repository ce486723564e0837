"""Where promotions that are under way are written down: the database of the pool, or a file of this home."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringmaster.flows import settings
from ringmaster.tasks.pool.database import Database, file_url
from ringmaster.tasks.promotion.moves import MoveLog


@contextmanager
def open_move_log() -> Iterator[MoveLog]:
    """The moves of aliases that were begun and not finished; all machines of a pool see the same ones."""
    pool = settings.pool()
    database = Database(pool.database if pool else file_url(settings.home() / "promotions.db"))
    try:
        yield MoveLog(database)
    finally:
        database.close()
