"""Batches that were handed over to a pool: they are in its database before anybody is told so.

The executor's process makes a flow run for each and looks after it (`ringmaster.flows.pool.batch_runs`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.patience import Patience
from ringmaster.tasks.pool.requests import GRANTED, OPEN, REFUSED, TRAIN, Request, Requests
from ringmaster.tasks.pool.submissions import Submissions


def hand_over(
    requests: Requests, batch: Mapping[str, Any], *, file: Path, checkpoint_every_s: float | None = None
) -> int:
    """Writes a batch, its JSON form, into the pool's database; returns the number under which it is there.

    file: where its flow run reads it, on storage that all nodes share; written anew where it is gone.
    """
    content = {"batch": dict(batch), "file": str(file), "checkpoint_every_s": checkpoint_every_s, "beats": 0}
    return requests.ask(TRAIN, content, key=f"train-{uuid.uuid4().hex}")


@contextmanager
def followed(database: Database, run: str) -> Iterator[None]:
    """Says again and again that a process follows the batch of a flow run; for runs of others it says nothing."""
    requests = Requests(database)

    def find() -> int | None:
        mine = (each for each in requests.open(TRAIN, status=GRANTED) if each.answer.get("flow_run") == run)
        return next((each.id for each in mine), None)

    every_s = Patience.of_environment().beat_every_s
    with requests.renewed(find, every_s=every_s) if run else nullcontext():
        yield


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A batch that was handed over and whose jobs are not the executor's yet, or never will be. is_over: the latter."""

    name: str
    jobs: tuple[str, ...]
    is_over: bool
    message: str


def pending(database: Database) -> list[Pending]:
    """The batches that were handed over and do not stand as such yet; of those that never will, each name's newest."""
    submitted = Submissions(database).flow_runs()
    every = Requests(database).of_kind(TRAIN)
    newest = {name_of(request): request.id for request in every}
    found = []
    for request in every:
        is_over = request.status == REFUSED
        is_shown = request.status in (OPEN, GRANTED) or (is_over and newest[name_of(request)] == request.id)
        if is_shown and request.answer.get("flow_run") not in submitted:
            message = request.answer.get("message", "") if is_over else _stage(request)
            jobs = tuple(str(job["name"]) for job in request.content["batch"]["jobs"])
            found.append(Pending(name=name_of(request), jobs=jobs, is_over=is_over, message=message))
    return found


def name_of(request: Request) -> str:
    """The name of a batch that was handed over."""
    return str(request.content["batch"]["name"])


def _stage(request: Request) -> str:
    if request.status == OPEN:
        return "in the pool's database; it has no flow run yet"
    return f"flow run {request.answer.get('run_name', '')} is to measure its jobs, or does"
