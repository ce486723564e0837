"""What people, flows and nodes ask of a pool's executor: it answers each request once, also where it died meanwhile."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from tasks.pool.database import Database
from tasks.pool.schema import REQUESTS

OPEN, GRANTED, DONE, REFUSED, WITHDRAWN = "open", "granted", "done", "refused", "withdrawn"
ANSWERED = (GRANTED, DONE, REFUSED)

CANCEL, PAUSE, RESUME, SET_PRIORITY, HOLD = "cancel", "pause", "resume", "set-priority", "hold"
DIRECT = "direct"
"""Kinds. The first four name a `batch`, and `jobs` of it or all ([]); `DIRECT` names a `batch` whose jobs are to go as
its other keys say, which are those of `Directions`; `HOLD` asks for all devices of a `node`, for
trials, until it is withdrawn or whoever asked `renew`s it no more."""

MOST_PRIORITY = 1000.0
LOOK_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Request:
    """One wish. answer: {"message": ...} where it was refused; `HOLD` names the devices that were granted."""

    id: int
    key: str
    kind: str
    content: Mapping[str, Any]
    status: str
    answer: Mapping[str, Any]


class Requests:
    """The wishes, oldest first. What asks for the same `key` again asks for the same."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def ask(self, kind: str, content: Mapping[str, Any], *, key: str | None = None) -> int:
        """Leaves a request; returns its number."""
        key = key or uuid.uuid4().hex

        def act(connection: Connection) -> int:
            number = connection.execute(select(REQUESTS.c.id).where(REQUESTS.c.key == key)).scalar()
            if number is None:
                row = {"key": key, "kind": kind, "content": dict(content), "status": OPEN, "answer": {}}
                number = connection.execute(
                    insert(REQUESTS).values(**row, made_s=time.time()).returning(REQUESTS.c.id)
                ).scalar_one()
            return int(number)

        return self._database.write(act)

    def open(self, *kinds: str, status: str = OPEN) -> Sequence[Request]:
        """The requests that stand so, of these kinds or of all."""
        query = select(REQUESTS).where(REQUESTS.c.status == status).order_by(REQUESTS.c.id)
        if kinds:
            query = query.where(REQUESTS.c.kind.in_(kinds))
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [_request(row._mapping) for row in rows]

    def read(self, number: int) -> Request:
        """A request as it stands now."""
        row = self._database.read(
            lambda connection: connection.execute(select(REQUESTS).where(REQUESTS.c.id == number)).one()
        )
        return _request(row._mapping)

    def answer(self, number: int, *, status: str, answer: Mapping[str, Any] | None = None) -> None:
        """Answers a request, or takes it back."""
        values = {"status": status, "answer": dict(answer or {})}
        self._database.write(
            lambda connection: connection.execute(update(REQUESTS).where(REQUESTS.c.id == number).values(**values))
        )

    def renew(self, number: int) -> bool:
        """Whoever asked still lives; returns whether the request stands, granted or not yet.

        The content counts as `beats` how often it was renewed: what is held for one who fell silent can be freed.
        """

        def act(connection: Connection) -> bool:
            here = (REQUESTS.c.id == number) & REQUESTS.c.status.in_((OPEN, GRANTED))
            content = connection.execute(select(REQUESTS.c.content).where(here)).scalar()
            if content is None:
                return False
            content = {**content, "beats": content.get("beats", 0) + 1}
            connection.execute(update(REQUESTS).where(here).values(content=content))
            return True

        return self._database.write(act)

    def wait(self, number: int, *, until: Callable[[], bool] = lambda: False) -> Request:
        """The request once it is answered, or once `until` says that nobody waits any more."""
        clock = threading.Event()
        while (request := self.read(number)).status not in ANSWERED and not until():
            clock.wait(LOOK_EVERY_S)
        return request


def _request(row: Mapping[Any, Any]) -> Request:
    return Request(**{key: row[key] for key in ("id", "key", "kind", "content", "status", "answer")})
