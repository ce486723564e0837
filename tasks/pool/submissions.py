"""Batches of a pool: those that were handed over or are being measured, and those that were submitted with profiles.

A batch that is handed over is in the pool's database before its submission is confirmed. The executor's process makes a
flow run for it and supervises it (`ringmaster.flows.pool.controller`). The process of a flow run, or of a command, that
measures a batch records it as a fact of the pool. Each of them can be cancelled: who acts on it finds the mark. Once
its jobs are profiled, the batch is submitted, to be included in the pool's plan.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.codec import from_json, to_json
from ringmaster.errors import RequestRefused
from ringmaster.tasks.control.requests import Request, RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.execution_events import JobEnded
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.pool.event_log import keep
from ringmaster.tasks.pool.nodes import Timeouts
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import MEASURING_PROGRESS
from ringmaster.tasks.storage.journal import JobRecord, JobStatus, Journal, details_of, recorded_clock
from ringmaster.tasks.storage.schema import BATCHES, FACTS, JOBS, REQUESTS, json_field
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.processes.order import KEPT_CHECKPOINTS


class BatchStatus(StrEnum):
    """The states of a batch in a pool."""

    SUBMITTED = "submitted"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A batch that a pool is to run.

    id: unique in the pool, without "/": the batch's name and the time. A flow run that is retried finds it by the fact
        "runs of FLOW_RUN" of the pool.
    name: the name of the batch.
    jobs: the jobs, with their number of steps resolved.
    profiles: the profiles of each job, by job name.
    data: the prepared data of each job that the preflight used, by job name.
    weights: the folders of models from outside of the batch: of a base by the job's name, of other parents by theirs.
    together: by the lead job of a group, the profiles under which the group can run; each names the group's members.
    folder: the folder of this run: models, logs, and checkpoints if `checkpoint_root` is None. All nodes share it then,
        or if `checkpoint_root` is a folder.
    terms: the objective, deadlines, weights and device price for its plans.
    started_s: the start of the batch, from which its deadlines count.
    flow_run: the Prefect flow run under which the segments are shown; empty for none.
    """

    id: str
    name: str
    jobs: tuple[Job, ...]
    profiles: Mapping[str, tuple[Profile, ...]]
    folder: str
    cache_dir: str
    terms: PlanningTerms = field(default_factory=PlanningTerms)
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    import_paths: tuple[str, ...] = ()
    checkpoint_every_s: float | None = None
    checkpoint_root: str | None = None
    flow_run: str = ""
    started_s: float = 0.0
    together: Mapping[str, tuple[Profile, ...]] = field(default_factory=dict)
    keep_checkpoints: int = KEPT_CHECKPOINTS

    def qualified(self, job: str) -> str:
        """Returns a job's name in the pool."""
        return f"{self.id}/{job}"

    def run_folder(self) -> Path:
        """Returns the folder of this run."""
        return Path(self.folder)

    def run_paths(self) -> RunPaths:
        """Returns the folders of this run, and the paths that its workers need."""
        return RunPaths(
            folder=self.run_folder(),
            cache_dir=Path(self.cache_dir),
            import_paths=self.import_paths,
            weights={job: Path(folder) for job, folder in self.weights.items()},
            data=self.data,
            checkpoint_every_s=self.checkpoint_every_s,
            checkpoint_root=self.checkpoint_root,
            keep_checkpoints=self.keep_checkpoints,
        )


class Submissions:
    """The batches that were submitted to a pool."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(
        self,
        submission: Submission,
        *,
        failed: Mapping[str, str] | None = None,
        records: Mapping[str, JobRecord] | None = None,
    ) -> None:
        """Submits a batch; a batch that exists with the same id is left unchanged.

        failed: by job name, why a job cannot be trained at all. These jobs are recorded as failed, with an event in the
            event log.
        records: what is known of the jobs already, by name.
        """
        faults, known = failed or {}, records or {}

        def act(connection: Connection) -> None:
            if connection.execute(select(BATCHES.c.id).where(BATCHES.c.id == submission.id)).first():
                return
            row = {"id": submission.id, "content": to_json(submission), "status": BatchStatus.SUBMITTED, "message": ""}
            connection.execute(insert(BATCHES).values(**row, submitted_s=recorded_clock(connection)()))
            rows = [
                {
                    "batch": submission.id,
                    "name": name,
                    "step": 0,
                    "status": JobStatus.FAILED if name in faults else JobStatus.WAITING,
                    "message": faults.get(name, ""),
                    "details": details_of(known[name]) if name in known else {},
                }
                for name in dict.fromkeys([*(job.name for job in submission.jobs), *faults])
            ]
            if rows:
                connection.execute(insert(JOBS), rows)
            for name, why in faults.items():
                record = JobRecord(name=name, status=JobStatus.FAILED, message=why)
                keep(connection, submission.id, JobEnded(record=record))

        self._database.write(act)

    def active(self) -> Mapping[str, str]:
        """Returns the flow run of each batch that has not ended, by the batch's id, oldest first; "" for no flow run.

        Unlike `unended`, it decodes no batch, which takes long for a thousand jobs.
        """
        query = select(BATCHES.c.id, json_field(BATCHES.c.content, "flow_run"))
        query = query.where(BATCHES.c.status == BatchStatus.SUBMITTED).order_by(BATCHES.c.submitted_s)
        return {id: flow_run or "" for id, flow_run in self._database.rows(query)}

    def flow_run(self, batch: str) -> str:
        """Returns the flow run under which the segments of a batch are shown; empty for none."""
        return (
            self._database.scalar(select(json_field(BATCHES.c.content, "flow_run")).where(BATCHES.c.id == batch)) or ""
        )

    def unended(self) -> Sequence[Submission]:
        """Returns the batches that have not ended, oldest first."""
        query = select(BATCHES.c.content).where(BATCHES.c.status == BatchStatus.SUBMITTED)
        every = self._database.scalars(query.order_by(BATCHES.c.submitted_s))
        return [from_json(Submission, content) for content in every]

    def find(self, batch: str) -> Submission | None:
        """Returns the batch with that id, or None."""
        content = self._database.scalar(select(BATCHES.c.content).where(BATCHES.c.id == batch))
        return None if content is None else from_json(Submission, content)

    def status(self, batch: str) -> BatchStatus | None:
        """Returns the state of a batch; None if there is no such batch."""
        result = self._database.scalar(select(BATCHES.c.status).where(BATCHES.c.id == batch))
        return None if result is None else BatchStatus(result)

    def names(self) -> Sequence[tuple[str, str, str]]:
        """Returns (id, name, status) of every batch that was ever submitted, oldest first."""
        query = select(BATCHES.c.id, json_field(BATCHES.c.content, "name"), BATCHES.c.status)
        rows = self._database.rows(query.order_by(BATCHES.c.submitted_s))
        return [(row[0], row[1] or row[0], row[2]) for row in rows]

    def folders(self) -> Mapping[str, str]:
        """Returns the folder of the run of every batch that was ever submitted, by its id."""
        rows = self._database.rows(select(BATCHES.c.id, BATCHES.c.content["folder"].as_string()))
        return {row[0]: row[1] for row in rows}

    def flow_runs(self) -> set[str]:
        """Returns the ids of the flow runs that have submitted a batch."""
        return set(self._database.scalars(select(json_field(BATCHES.c.content, "flow_run"))))

    def end(self, batch: str, *, message: str = "") -> None:
        """Marks a batch as ended, once all of its jobs have ended. message: why the pool has refused it, if so."""
        self._set(batch, BatchStatus.ENDED, message=message)

    def reopen(self, batch: str) -> None:
        """Marks an ended batch as submitted again, as some of its jobs continue."""
        self._set(batch, BatchStatus.SUBMITTED)

    def _set(self, batch: str, status: BatchStatus, *, message: str = "") -> None:
        here = update(BATCHES).where(BATCHES.c.id == batch)
        self._database.execute(here.values(status=status, message=message))


MEASURING = "measuring "  # begins the key of the pool's fact about a batch that is being measured
CANCELLED = "cancelled"  # in the content of a request and in a measurement: the cause, once somebody has cancelled it


def hand_over(
    requests: Requests, batch: Mapping[str, Any], *, file: Path, checkpoint_every_s: float | None = None
) -> int:
    """Writes a batch, in its JSON form, into the pool's database; returns the number of its request.

    file: the file from which the batch's flow run reads it, on storage that all nodes share. It is written again if it
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
        granted = requests.open(RequestKind.TRAIN, status=RequestStatus.GRANTED)
        return next((each.id for each in granted if each.answer.get("flow_run") == run), None)

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
    result = []
    for value in database.scalars(query):
        with suppress(ValueError, LookupError, TypeError):
            result.append(from_json(BatchMeasurement, value[0]))
    return result


def is_cancelled(database: Database, id: str, *, flow_run: str) -> bool:
    """Returns whether somebody has cancelled a batch before its jobs were submitted. flow_run: that measures it."""
    if (Journal(database, batch="").get(f"{MEASURING}{id}") or {}).get(CANCELLED):
        return True
    is_own = json_field(REQUESTS.c.answer, "flow_run") == flow_run
    query = select(json_field(REQUESTS.c.content, CANCELLED)).where(REQUESTS.c.kind == RequestKind.TRAIN, is_own)
    marks = database.scalars(query)
    return any(marks)


def unsubmitted(database: Database) -> dict[str, str]:
    """Returns the names of the batches that can be cancelled and whose jobs the executor does not have, by their keys.

    The key of one that was handed over is that of its request, of another one its id.
    """
    submitted, requests = Submissions(database).flow_runs(), Requests(database).current()
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
    requests, facts = Requests(database), Journal(database, batch="")
    for request in requests.current():
        if request.key == key:
            return requests.note(request.id, **{CANCELLED: why})
    result = facts.get(f"{MEASURING}{key}")
    if result is not None:
        facts.put(f"{MEASURING}{key}", {**result, CANCELLED: why})
    return result is not None


def cancel_waiting(database: Database, content: Mapping[str, Any]) -> str | None:
    """Cancels the batch of `unsubmitted` that a request is about, and returns the answer; None if it is about none."""
    key, why = str(content.get("batch", "")), str(content.get("message") or "cancelled by hand")
    if key not in (names := unsubmitted(database)):
        return None
    if content.get("jobs"):
        raise RequestRefused(
            f"the jobs of batch {names[key]} are being measured, and cannot be cancelled one by one before they "
            "are planned. To fix: cancel the whole batch, or wait"
        )
    if not cancel_unsubmitted(database, key, why=why):
        raise RequestRefused(f"batch {names[key]} is measured by now. To fix: cancel it again")
    return f"cancelled: batch {names[key]}, whose jobs were not measured yet"


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
    submitted, every = Submissions(database).flow_runs(), Requests(database).of_kind(RequestKind.TRAIN)
    newest = {name_of(request): request.id for request in every}
    measuring = {each.flow_run: each for each in measurements(database)}
    result = []
    for request in every:
        flow_run, name, batch = str(request.answer.get("flow_run", "")), name_of(request), request.content.get("batch")
        is_over = request.status in (RequestStatus.REFUSED, RequestStatus.WITHDRAWN)
        is_alive = request.status in (RequestStatus.OPEN, RequestStatus.GRANTED)
        if flow_run in submitted or not (is_alive or (is_over and newest[name] == request.id)):
            continue
        measurement = measuring.pop(flow_run, None)
        if measurement is not None and not is_over:
            result.append(_measuring(database, measurement))
            continue
        jobs = batch.get("jobs") if isinstance(batch, Mapping) else None
        message = request.answer.get("message", "") if is_over else _stage(request)
        status = "handed over" if not is_over else "cancelled" if request.content.get(CANCELLED) else "failed"
        names = tuple(str(job.get("name")) for job in jobs or () if isinstance(job, Mapping))
        result.append(PendingBatch(name=name, jobs=names, is_over=is_over, message=message, status=status))
    return result + [_measuring(database, each) for run, each in measuring.items() if run not in submitted]


def name_of(request: Request) -> str:
    """Returns the name of a batch that was handed over."""
    batch = request.content.get("batch")
    return str(batch.get("name")) if isinstance(batch, Mapping) else f"request {request.id}"


def _measuring(database: Database, measurement: BatchMeasurement) -> PendingBatch:
    progress = Journal(database, batch=measurement.id).get(MEASURING_PROGRESS, "its measurement begins")
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
