"""Requests of a person about batches that run on a pool: finding the batch, asking, and waiting for the answer."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import DBAPIError

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.tasks.pool.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.pool.submissions import BatchStatus, Submissions, unsubmitted
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal

DATABASE_PATIENCE_S = 15.0  # for a person who waits at a command
ANSWER_PATIENCE_S = 20.0  # longer than the replacement of a controller takes

NO_POOL = (
    "no pool is up here. To fix: `ringmaster up` starts one on this machine; RINGMASTER_DATABASE, PREFECT_API_URL and "
    "MLFLOW_TRACKING_URI name one elsewhere"
)


@dataclass(frozen=True, kw_only=True)
class ControllerAnswer:
    """The answer of a pool's controller about one batch.

    batch: id of the batch.
    is_done: whether the controller has performed the request; if not, it will.
    message: the answer's text.
    """

    batch: str
    is_done: bool
    message: str


def pool_address() -> settings.PoolAddress:
    """Returns the pool that this machine belongs to. Raises InputError if there is none."""
    address = settings.pool()
    if address is None:
        raise InputError([NO_POOL])
    return address


@contextmanager
def open_database(address: settings.PoolAddress) -> Iterator[Database]:
    """Opens the pool's database with a short timeout. Raises InputError if it does not answer."""
    try:
        database = Database(address.database, patience_s=DATABASE_PATIENCE_S)
    except DBAPIError as error:
        raise InputError([f"the pool's database does not answer: {error.orig}. To fix: see that it runs"]) from error
    with closing(database):
        yield database


def ask_about(
    database: Database,
    kind: RequestKind,
    *,
    batch: str,
    jobs: Sequence[str] = (),
    patience_s: float = ANSWER_PATIENCE_S,
    **more: Any,
) -> list[ControllerAnswer]:
    """Sends the pool's controller a request about a batch, or some of its jobs, and waits for its answers.

    kind: a kind of request of `tasks.pool.requests`.
    batch: an id, or a name, which stands for all active batches of that name.

    Raises InputError if there is no such batch or job, or if the controller refuses.
    """
    requests = Requests(database)
    numbers = {
        key: requests.ask(kind, {"batch": key, "jobs": list(own), **more})
        for key, own in meant(database, batch=batch, jobs=jobs, kind=kind).items()
    }
    with in_time(patience_s) as is_over:
        result = {key: requests.wait(number, until=is_over) for key, number in numbers.items()}
    faults = [
        str(r.answer.get("message", r.status))
        for r in result.values()
        if r.status not in (RequestStatus.DONE, RequestStatus.OPEN)
    ]
    if faults:
        raise InputError(faults)
    late = "no controller has answered yet: it is done once one leads (`ringmaster pool controller`)"
    return [
        ControllerAnswer(
            batch=key, is_done=request.status == RequestStatus.DONE, message=str(request.answer.get("message", late))
        )
        for key, request in result.items()
    ]


@contextmanager
def in_time(patience_s: float) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether `patience_s` seconds have passed."""
    over = threading.Event()
    timer = threading.Timer(patience_s, over.set)
    timer.start()
    try:
        yield over.is_set
    finally:
        timer.cancel()


def meant(
    database: Database, *, batch: str, jobs: Sequence[str], kind: RequestKind | None = None
) -> dict[str, list[str]]:
    """Returns the active batches, by id, that `batch` names, and which of `jobs` each has; [] stands for all jobs.

    kind: of the request. A batch that is not measured yet can be cancelled, and nothing else.

    Raises InputError, which lists the existing names, if there is nothing of that name.
    """
    every = Submissions(database).names()
    active = {key: name for key, name, status in every if status == BatchStatus.SUBMITTED}
    early = unsubmitted(database)
    known = active | (early if kind == RequestKind.CANCEL else {})
    chosen = [key for key in known if key == batch] or [key for key, name in known.items() if name == batch]
    if not chosen and batch in (*early, *early.values()):
        raise InputError([f"batch {batch!r} is not measured yet. To fix: cancel it, or wait until it is planned"])
    if not chosen:
        there = ", ".join(sorted({f"{name} ({key})" for key, name in active.items()})) or "none"
        has_ended = any(batch in (key, name) for key, name, _ in every)
        what = f"batch {batch!r} has ended" if has_ended else f"there is no batch {batch!r}"
        raise InputError([f"{what}; active batches: {there}"])
    if not jobs:
        return {key: [] for key in chosen}
    if any(key in early for key in chosen):
        raise InputError([f"the jobs of batch {batch!r} are not measured yet. To fix: cancel the whole batch, or wait"])
    names = {key: list(Journal(database, batch=key).jobs()) for key in chosen}
    unknown = [job for job in jobs if not any(job in own for own in names.values())]
    if unknown:
        there = ", ".join(dict.fromkeys(job for own in names.values() for job in own))
        raise InputError([f"batch {batch} has no job {', '.join(unknown)}; it has {there}"])
    return {key: own for key in chosen if (own := [job for job in jobs if job in names[key]])}
