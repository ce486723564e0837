"""Batches of a pool whose jobs its executor does not have yet: they were handed over, or are being measured.

A batch that is handed over is in the pool's database before its submission is confirmed. The executor's process makes a
flow run for it and supervises it (`ringmaster.flows.pool.batch_runs`). The process of a flow run, or of a command,
that measures a batch says so in a fact of the pool. Each of them can be cancelled: who acts on it finds the mark.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.pool.nodes import Timeouts
from ringmaster.tasks.pool.requests import Request, RequestKind, Requests, RequestStatus
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import FACTS, REQUESTS, json_field

MEASURING = "measuring "  # begins the key of the pool's fact about a batch that is being measured
PROGRESS = "progress"  # the fact of such a batch: what is being measured, and how much of it is done
CANCELLED = "cancelled"  # in the content of a request and in a measurement: the cause, once somebody has cancelled it


def hand_over(
    requests: Requests, batch: Mapping[str, Any], *, file: Path, checkpoint_every_s: float | None = None
) -> int:
    """Writes a batch, in its JSON form, into the pool's database; returns the number of its request.

    file: the file from which the batch's flow run reads it, on storage that all nodes share. It is written anew if it
        is gone.
    """
    content = {"batch": dict(batch), "file": str(file), "checkpoint_every_s": checkpoint_every_s, "beats": 0}
    return requests.ask(RequestKind.TRAIN, content, key=f"train-{uuid.uuid4().hex}")


@contextmanager
def followed(database: Database, run: str) -> Iterator[None]:
    """Renews the request of a flow run's batch while the context is open, to show that a process follows the batch.

    A flow run that has no such request renews nothing.
    """
    requests = Requests(database)

    def find() -> int | None:
        mine = (
            each
            for each in requests.open(RequestKind.TRAIN, status=RequestStatus.GRANTED)
            if each.answer.get("flow_run") == run
        )
        return next((each.id for each in mine), None)

    every_s = Timeouts.of_environment().beat_every_s
    with requests.renewed(find, every_s=every_s) if run else nullcontext():
        yield


@dataclass(frozen=True, kw_only=True)
class BatchMeasurement:
    """A batch that a process measures now. id: of the run, and of its submission. flow_run: the process's own."""

    id: str
    name: str
    jobs: tuple[str, ...]
    flow_run: str
    cancelled: str = ""


@contextmanager
def measured(database: Database, measurement: BatchMeasurement) -> Iterator[None]:
    """Inside the context, the pool knows that this process measures a batch."""
    facts, key = Journal(database, batch=""), f"{MEASURING}{measurement.id}"
    facts.put(key, to_json(measurement))
    try:
        yield
    finally:
        with suppress(SQLAlchemyError):  # the database is away; the controller removes it
            facts.remove(key)


def measurements(database: Database) -> list[BatchMeasurement]:
    """Returns the batches that are being measured, and those whose process died meanwhile."""
    query = select(FACTS.c.value).where(FACTS.c.batch == "", FACTS.c.key.startswith(MEASURING)).order_by(FACTS.c.key)
    found = []
    for value in database.read(lambda connection: connection.execute(query).scalars().all()):
        with suppress(ValueError, LookupError, TypeError):
            found.append(from_json(BatchMeasurement, value[0]))
    return found


def is_cancelled(database: Database, id: str, *, flow_run: str) -> bool:
    """Returns whether somebody has cancelled a batch before its jobs were submitted. flow_run: that measures it."""
    if (Journal(database, batch="").get(f"{MEASURING}{id}") or {}).get(CANCELLED):
        return True
    query = select(json_field(REQUESTS.c.content, CANCELLED)).where(
        REQUESTS.c.kind == RequestKind.TRAIN, json_field(REQUESTS.c.answer, "flow_run") == flow_run
    )
    return any(database.read(lambda connection: connection.execute(query).scalars().all()))


def unsubmitted(database: Database) -> dict[str, str]:
    """Returns the names of the batches that can be cancelled and whose jobs the executor does not have, by their keys.

    The key of one that was handed over is that of its request, of another one its id.
    """
    submitted, requests = Submissions(database).flow_runs(), Requests(database).standing()
    waiting = {
        request.key: request
        for request in requests
        if request.kind == RequestKind.TRAIN and str(request.answer.get("flow_run")) not in submitted
    }
    followed_runs = {str(request.answer.get("flow_run")) for request in waiting.values()}
    own = {m.id: m.name for m in measurements(database) if m.flow_run not in followed_runs | submitted}
    return {key: name_of(request) for key, request in waiting.items()} | own


def cancel_unsubmitted(database: Database, key: str, *, why: str) -> bool:
    """Marks a batch of `unsubmitted` as cancelled; returns False if there is none with that key any more."""
    requests = Requests(database)
    for request in requests.standing():
        if request.key == key:
            return requests.note(request.id, **{CANCELLED: why})
    facts = Journal(database, batch="")
    found = facts.get(f"{MEASURING}{key}")
    if found is None:
        return False
    facts.put(f"{MEASURING}{key}", {**found, CANCELLED: why})
    return True


@dataclass(frozen=True, kw_only=True)
class PendingBatch:
    """A batch that was handed over or is measured and whose jobs the executor does not have yet, or will never have.

    run: its id, once it is measured.
    status: "handed over", "measuring", "failed" or "cancelled".
    is_over: whether the executor will never have its jobs.
    """

    name: str
    jobs: tuple[str, ...]
    is_over: bool
    message: str
    run: str = ""
    status: str = "handed over"


def pending(database: Database) -> list[PendingBatch]:
    """Returns the batches of which no job is submitted; of those that will never be, each name's newest."""
    submitted = Submissions(database).flow_runs()
    every = Requests(database).of_kind(RequestKind.TRAIN)
    newest = {name_of(request): request.id for request in every}
    measuring = {each.flow_run: each for each in measurements(database)}
    found = []
    for request in every:
        flow_run, name = str(request.answer.get("flow_run", "")), name_of(request)
        is_over = request.status in (RequestStatus.REFUSED, RequestStatus.WITHDRAWN)
        is_shown = request.status in (RequestStatus.OPEN, RequestStatus.GRANTED) or (
            is_over and newest[name] == request.id
        )
        if is_shown and flow_run not in submitted:
            measurement = measuring.pop(flow_run, None)
            if measurement is not None and not is_over:
                found.append(_measuring(database, measurement))
                continue
            message = request.answer.get("message", "") if is_over else _stage(request)
            status = "handed over" if not is_over else "cancelled" if request.content.get(CANCELLED) else "failed"
            found.append(
                PendingBatch(name=name, jobs=_jobs_of(request), is_over=is_over, message=message, status=status)
            )
    return found + [_measuring(database, each) for run, each in measuring.items() if run not in submitted]


def name_of(request: Request) -> str:
    """Returns the name of a batch that was handed over."""
    batch = request.content.get("batch")
    return str(batch.get("name")) if isinstance(batch, Mapping) else f"request {request.id}"


def _jobs_of(request: Request) -> tuple[str, ...]:
    batch = request.content.get("batch")
    jobs = batch.get("jobs") if isinstance(batch, Mapping) else None
    return tuple(str(job.get("name")) for job in jobs or () if isinstance(job, Mapping))


def _measuring(database: Database, measurement: BatchMeasurement) -> PendingBatch:
    progress = Journal(database, batch=measurement.id).get(PROGRESS, "its measurement begins")
    message = f"is being cancelled: {measurement.cancelled}" if measurement.cancelled else progress
    return PendingBatch(
        name=measurement.name,
        jobs=measurement.jobs,
        is_over=False,
        message=message,
        run=measurement.id,
        status="measuring",
    )


def _stage(request: Request) -> str:
    if request.content.get(CANCELLED):
        return f"is being cancelled: {request.content[CANCELLED]}"
    if request.status == RequestStatus.OPEN:
        return "in the pool's database; it has no flow run yet"
    return f"flow run {request.answer.get('run_name', '')} is to measure its jobs, or does"
