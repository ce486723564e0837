"""The event log: the stored decisions of a pool's controller about its batches, and their plans.

The events of gangs are in the message store; `batch_events` reads both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from sqlalchemy import Connection, func, insert, select

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid, Planned, SegmentEnded, SegmentStarted
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import TOLD
from ringmaster.techniques.processes.events import event_from_json

logger = logging.getLogger(__name__)

_KINDS: Mapping[str, Any] = {cls.__name__: cls for cls in get_args(ExecutionEvent)}


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """The start or the end of a segment, with its number in the log and its batch."""

    id: int
    batch: str
    event: SegmentStarted | SegmentEnded


class EventLog:
    """The events of a pool's batches, in order."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, batch: str, event: ExecutionEvent) -> None:
        """Stores an event of a batch. The event names jobs by their names within the batch."""
        self._database.insert_later(TOLD, **_row(batch, event))

    def segment_events(self, *, after: int, most: int = 1000) -> list[PoolEntry]:
        """Returns the starts and ends of the segments of all batches after the event with that number, in order."""
        kinds = (SegmentStarted.__name__, SegmentEnded.__name__)
        query = select(TOLD.c.id, TOLD.c.batch, TOLD.c.kind, TOLD.c.content).where(
            TOLD.c.id > after, TOLD.c.kind.in_(kinds)
        )
        rows = self._database.read(lambda connection: connection.execute(query.order_by(TOLD.c.id).limit(most)).all())
        found = [(row, event_of_row(row)) for row in rows]
        return [
            PoolEntry(id=row.id, batch=row.batch, event=event)
            for row, event in found
            if isinstance(event, (SegmentStarted, SegmentEnded))
        ]

    def newest(self) -> int:
        """Returns the number of the last event of all batches, 0 if there is none."""
        return self._database.read(lambda connection: connection.execute(select(func.max(TOLD.c.id))).scalar()) or 0


def keep(connection: Connection, batch: str, event: ExecutionEvent) -> None:
    """Stores an event as part of a transaction."""
    connection.execute(insert(TOLD).values(**_row(batch, event)))


def _row(batch: str, event: ExecutionEvent) -> dict[str, Any]:
    return {"batch": batch, "kind": type(event).__name__, "content": content_of(event), "told_s": time.time()}


def content_of(event: ExecutionEvent) -> Mapping[str, Any]:
    """Returns an event as JSON values, from which `event_of` reads it."""
    if isinstance(event, Planned):
        return {"problem": event.problem.to_json(), "plan": event.plan.to_json(), "why": event.why}
    assert not isinstance(event, GangSaid), "the events of gangs are in the message store"
    content: Mapping[str, Any] = to_json(event)
    return content


def event_of_row(row: Any) -> ExecutionEvent | None:
    """Returns the event of a row; None, and logs why, for one that cannot be read: damaged, or of another release."""
    try:
        return event_of(row.kind, row.content)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        logger.error(
            "row %d of the event log cannot be read (%s): %s: %s", row.id, row.kind, type(error).__name__, error
        )
        return None


def event_of(kind: str, content: Mapping[str, Any]) -> ExecutionEvent:
    """Returns the event of its kind and `content_of`.

    Rows of earlier releases may have copies of the events of gangs.
    """
    if kind == Planned.__name__:
        problem, plan = Problem.from_json(content["problem"]), Plan.from_json(content["plan"])
        return Planned(problem=problem, plan=plan, why=content["why"])
    if kind == GangSaid.__name__:
        return GangSaid(number=content["number"], job=content["job"], event=event_from_json(content["event"]))
    cls: Any = _KINDS[kind]
    event: ExecutionEvent = from_json(cls, content)
    return event
