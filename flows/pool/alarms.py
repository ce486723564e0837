"""The alarms of a pool, which a thread beside its controller raises; flows raise the alarms of their own work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.alarms import Alarm, DeadlineAlarms, NodeAlarms
from ringmaster.tasks.alarms.task import sound
from ringmaster.tasks.pool.nodes import Nodes
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.database import Database, DatabaseClosed
from ringmaster.tasks.timeline.reader import TimelineReader

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0

Sound = Callable[[Alarm], None]
"""Sends an alarm."""


class PoolAlarms:
    """Watches a pool for lost nodes and devices, and for batches whose deadlines come to be in danger."""

    def __init__(self, database: Database, *, sound: Sound = sound) -> None:
        self._database, self._sound = database, sound
        self._nodes = NodeAlarms()
        self._deadlines: dict[str, DeadlineAlarms | None] = {}  # by active batch; None for one without deadlines
        self._timeline_reader = TimelineReader(database, name="the pool", is_pool=True)

    def keep_looking(self, until: threading.Event) -> None:
        """Checks the pool periodically until `until` is set; skips checks while the database is away."""
        while not until.wait(LOOK_EVERY_S):
            with suppress(SQLAlchemyError, DatabaseClosed):
                self.look()

    def look(self) -> list[Alarm]:
        """Sends and returns the alarms that are new since the last check."""
        nodes = Nodes(self._database)
        records = nodes.all()  # before those that have left: whoever leaves in between is in both
        found = [*self._nodes.look(records, left=nodes.left()), *self._late()]
        for alarm in found:
            logger.warning("alarm: %s", alarm.message)
            self._sound(alarm)
        return found

    def _late(self) -> list[Alarm]:
        submissions = Submissions(self._database)
        active = submissions.active()
        self._deadlines = {id: known for id, known in self._deadlines.items() if id in active}
        found: list[Alarm] = []
        for id in active:
            if id not in self._deadlines:
                self._deadlines[id] = _watch(submissions.find(id))
            if (watch := self._deadlines[id]) is not None:
                found += watch.look(self._timeline_reader.read(id))
        return found


def _watch(batch: Submission | None) -> DeadlineAlarms | None:
    """Returns the watch over a batch's deadlines, None if it has none."""
    if batch is None or not batch.asked.deadlines_s:
        return None
    return DeadlineAlarms(batch.name, deadlines_s=batch.asked.deadlines_s, started_s=batch.started_s)
