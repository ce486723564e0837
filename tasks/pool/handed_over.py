"""Batches that were handed over to a pool: each is in the pool's database before its submission is confirmed.

The executor's process makes a flow run for each batch and supervises it (`ringmaster.flows.pool.runs.batch_runs`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.tasks.pool.requests import Request, RequestKind, Requests, RequestStatus
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.pool.timeouts import Timeouts
from ringmaster.tasks.storage.database import Database

WAITING = (RequestStatus.OPEN, RequestStatus.GRANTED)


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
class Pending:
    """A batch that was handed over and whose jobs the executor does not have yet, or will never have.

    is_over: whether the executor will never have them.
    """

    name: str
    jobs: tuple[str, ...]
    is_over: bool
    message: str


def pending(database: Database) -> list[Pending]:
    """Returns the batches that were handed over and not submitted; of the refused ones, each name's newest."""
    submitted = Submissions(database).flow_runs()
    every = Requests(database).of_kind(RequestKind.TRAIN)
    newest = {name_of(request): request.id for request in every}
    found = []
    for request in every:
        is_over = request.status in (RequestStatus.REFUSED, RequestStatus.WITHDRAWN)
        is_shown = request.status in WAITING or (is_over and newest[name_of(request)] == request.id)
        if is_shown and request.answer.get("flow_run") not in submitted:
            message = request.answer.get("message", "") if is_over else _stage(request)
            jobs = tuple(str(job["name"]) for job in request.content["batch"]["jobs"])
            found.append(Pending(name=name_of(request), jobs=jobs, is_over=is_over, message=message))
    return found


def waiting(database: Database, *, batch: str) -> list[Request]:
    """Returns the requests of the batches of that name, or that id, whose jobs are not submitted yet.

    These are requests of kind TRAIN of batches that were handed over, and of kind NODE of batches that are measured.
    """
    submissions, requests = Submissions(database), Requests(database)
    submitted = submissions.flow_runs()
    handed_over = [request for status in WAITING for request in requests.open(RequestKind.TRAIN, status=status)]
    return [
        *(r for r in handed_over if name_of(r) == batch and r.answer.get("flow_run") not in submitted),
        *(
            r
            for r in requests.open(RequestKind.NODE)
            if batch in (r.content.get("batch"), r.content.get("run")) and submissions.status(r.content["run"]) is None
        ),
    ]


def name_of(request: Request) -> str:
    """Returns the name of a batch that was handed over."""
    return str(request.content["batch"]["name"])


def _stage(request: Request) -> str:
    if request.status == RequestStatus.OPEN:
        return "in the pool's database; it has no flow run yet"
    return f"flow run {request.answer.get('run_name', '')} is to measure its jobs, or does"
