"""The alarms of a pool, told by a watcher beside its executor; flows tell those of their own work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.alarms import Alarm, DeadlineAlarms, NodeAlarms
from ringmaster.tasks.alarms.task import sound
from ringmaster.tasks.execution.historian import Historian
from ringmaster.tasks.pool.database import Database, DatabaseClosed
from ringmaster.tasks.pool.nodes import Nodes
from ringmaster.tasks.pool.submissions import Submissions

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0

Sound = Callable[[Alarm], None]
"""Tells somebody of an alarm."""


class PoolAlarms:
    """Watches a pool: nodes and devices that are lost, and deadlines of its batches that come to be in danger."""

    def __init__(self, database: Database, *, sound: Sound = sound) -> None:
        self._database, self._sound = database, sound
        self._nodes = NodeAlarms()
        self._deadlines: dict[str, DeadlineAlarms] = {}
        self._historian = Historian(database, name="the pool", is_pool=True)

    def keep_looking(self, until: threading.Event) -> None:
        """Looks again and again until it is told to end; while the database is away there is nothing to see."""
        while not until.wait(LOOK_EVERY_S):
            with suppress(SQLAlchemyError, DatabaseClosed):
                self.look()

    def look(self) -> list[Alarm]:
        """Tells what is new since the last look, and returns it."""
        found = [*self._nodes.look(Nodes(self._database).all()), *self._late()]
        for alarm in found:
            logger.warning("alarm: %s", alarm.message)
            self._sound(alarm)
        return found

    def _late(self) -> list[Alarm]:
        standing = {each.id: each for each in Submissions(self._database).standing() if each.asked.deadlines_s}
        self._deadlines = {id: known for id, known in self._deadlines.items() if id in standing}
        found: list[Alarm] = []
        for id, batch in standing.items():
            watch = self._deadlines.setdefault(
                id, DeadlineAlarms(batch.name, deadlines_s=batch.asked.deadlines_s, started_s=batch.started_s)
            )
            found += watch.look(self._historian.read(id))
        return found
