"""Requests of users, flows and nodes to what executes batches, which answers each one once, even after a crash."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select, update

from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.storage.database import Database, DatabaseClosed, insert_once
from ringmaster.tasks.storage.schema import REQUESTS

MAX_PRIORITY = 1000.0
SETTINGS = ("steps", "weight", "deadline", "priority")
"""What can be set of a running job: its number of steps; the weight of its end; its deadline, in seconds from the start
of its batch; its priority, which multiplies the weight.
"""
LOOK_EVERY_S = 0.05  # a person waits for the answer
ANSWER_EVERY_S = 0.2  # twenty looks a second cost a hundredth of a core, for which gangs on CPUs compete
LAST_RENEWAL_S = 2.0


class RequestStatus(StrEnum):
    """The states of a request."""

    OPEN = "open"
    GRANTED = "granted"
    DONE = "done"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


ANSWERED = (RequestStatus.GRANTED, RequestStatus.DONE, RequestStatus.REFUSED)


class RequestKind(StrEnum):
    """The kinds of requests.

    - `CANCEL`, `PAUSE`, `RESUME` and `RETRY` name a `batch`, and `jobs` of it or all ([]). A run on one machine alone
      has the name "".
    - `SET` changes `settings` of such jobs, by name: those of `SETTINGS`.
    - `DIRECT` steers the jobs of a `batch` by its other keys, which are those of `SteeringRequest`.
    - `LEND` requests idle devices of a `node`, as many as its keys of `DevicesWanted` state. It holds until it is
      withdrawn, or until the requester no longer `renew`s it.
    - `NODE` means that a batch needs a node for profiling, as long as it is renewed.
    - `TRAIN` hands over a `batch`, in its JSON form, to be profiled and trained. A granted one has a flow run, which
      renews it (`ringmaster.tasks.pool.submissions`).

    Features have further kinds of requests about batches (`tasks.control.request_handler`).
    """

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    RETRY = "retry"
    SET = "set"
    DIRECT = "direct"
    LEND = "lend"
    NODE = "node"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    kind: a `RequestKind`, one of a feature, or one of another release, which this one does not know.
    answer: {"message": ...} for a refused request; for `LEND`, the devices that were granted.
    """

    id: int
    key: str
    kind: str
    content: Mapping[str, Any]
    status: RequestStatus
    answer: Mapping[str, Any]


class Requests:
    """The requests, oldest first. Asking again with the same `key` returns the same request."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def ask(self, kind: str, content: Mapping[str, Any], *, key: str | None = None) -> int:
        """Stores a request; returns its number."""
        row: dict[str, Any] = {
            "key": key or uuid.uuid4().hex,
            "kind": kind,
            "content": dict(content),
            "status": RequestStatus.OPEN,
            "answer": {},
            "made_s": time.time(),
        }
        return self._database.write(lambda connection: insert_once(connection, REQUESTS, **row))

    def open(self, *kinds: RequestKind, status: RequestStatus = RequestStatus.OPEN) -> Sequence[Request]:
        """Returns the requests with that status, of these kinds or of all."""
        here = REQUESTS.c.status == status
        return self._read(here & REQUESTS.c.kind.in_(kinds) if kinds else here)

    def current(self) -> Sequence[Request]:
        """Returns the requests that are open or granted."""
        return self._read(REQUESTS.c.status.in_((RequestStatus.OPEN, RequestStatus.GRANTED)))

    def of_kind(self, kind: RequestKind) -> Sequence[Request]:
        """Returns all requests of a kind, in any status."""
        return self._read(REQUESTS.c.kind == kind)

    def read(self, number: int) -> Request:
        """Returns a request in its present state."""
        (request,) = self._read(REQUESTS.c.id == number)
        return request

    def newest(self) -> int:
        """Returns the number of the newest request, 0 if there is none. It costs less than reading the requests."""
        return int(self._database.scalars(select(func.coalesce(func.max(REQUESTS.c.id), 0)))[0])

    def _read(self, where: ColumnElement[bool]) -> Sequence[Request]:
        rows = self._database.rows(select(REQUESTS).where(where).order_by(REQUESTS.c.id))
        return [_request(row._mapping) for row in rows]

    def answer(self, number: int, *, status: RequestStatus, answer: Mapping[str, Any] | None = None) -> None:
        """Answers a request, or withdraws it."""
        here = update(REQUESTS).where(REQUESTS.c.id == number)
        self._database.execute(here.values(status=status, answer=dict(answer or {})))

    def refuse(self, request: Request, message: str) -> None:
        """Refuses a request that is open, and ends one that was granted."""
        status = RequestStatus.REFUSED if request.status == RequestStatus.OPEN else RequestStatus.WITHDRAWN
        self.answer(request.id, status=status, answer={"message": message})

    def renew(self, number: int) -> bool:
        """Renews a request, as a sign that the requester is alive; returns whether the request is open or granted.

        The content counts the renewals as `beats`, so that devices held for a requester that fell silent can be freed.
        """
        return self._change(number, lambda content: {**content, "beats": content.get("beats", 0) + 1})

    def note(self, number: int, **details: Any) -> bool:
        """Adds details to the content of a request; returns whether the request is open or granted."""
        return self._change(number, lambda content: {**content, **details})

    def _change(self, number: int, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> bool:
        def act(connection: Connection) -> bool:
            here = (REQUESTS.c.id == number) & REQUESTS.c.status.in_((RequestStatus.OPEN, RequestStatus.GRANTED))
            content = connection.execute(select(REQUESTS.c.content).where(here)).scalar()
            if content is None:
                return False
            connection.execute(update(REQUESTS).where(here).values(content=change(content)))
            return True

        return self._database.write(act)

    @contextmanager
    def renewed(self, find: Callable[[], int | None], *, every_s: float) -> Iterator[None]:
        """Renews a request from a background thread while the context is open and the request holds.

        find: returns the number of the request, or None if it does not exist yet; it is called again until it does.
        """

        def renew(over: threading.Event) -> None:
            number = None
            with suppress(DatabaseClosed):
                while not over.wait(every_s):
                    number = find() if number is None else number
                    if number is not None and not self.renew(number):
                        return

        with background_thread(
            renew, name="renew", timeout_s=LAST_RENEWAL_S
        ):  # limited, as the database may be unreachable
            yield

    def wait(self, number: int, *, until: Callable[[], bool] = lambda: False) -> Request:
        """Returns the request once it is answered, or once `until` returns True."""
        clock = threading.Event()
        while (request := self.read(number)).status not in ANSWERED and not until():
            clock.wait(LOOK_EVERY_S)
        return request


def _request(row: Mapping[Any, Any]) -> Request:
    content, answer = (row[key] if isinstance(row[key], dict) else {} for key in ("content", "answer"))
    status = RequestStatus(row["status"])
    return Request(id=row["id"], key=row["key"], kind=row["kind"], content=content, status=status, answer=answer)
