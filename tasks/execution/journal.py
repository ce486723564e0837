"""What happened to a batch, written down before it is acted on: the batch goes on from here after any crash.

A SQLite file of its own for a batch on this machine; one database for all batches of a pool. Times are seconds since
the epoch.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Select, delete, insert, select, update

from ringmaster.tasks.pool.database import Database, file_url
from ringmaster.tasks.pool.schema import FACTS, JOBS, PLANS, SEGMENTS
from ringmaster.techniques import Job

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
PAUSED, CANCELLED = "paused", "cancelled"
STOPPED = "stopped"  # early, by whoever steers the batch: no failure
ENDED = (DONE, FAILED, CANCELLED, STOPPED)


LEADER = "leader"
"""Key of a job's details: the job whose gang trained it, where one did."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Where a job stands: `step` steps are done and checkpointed; `details` hold metrics, model folder, run id."""

    name: str
    status: str = WAITING
    step: int = 0
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SegmentRecord:
    """A segment that was started: `what` says technique, config, devices and steps; `outcome` is None while it runs."""

    id: int
    job: str
    what: Mapping[str, Any]
    started_s: float
    ended_s: float | None = None
    outcome: Mapping[str, Any] | None = None

    @property
    def num_jobs(self) -> int:
        """The jobs that its gang trained, which share what its devices cost."""
        return int(self.what.get("num_jobs", 1 + len(_beside(self))))


class Journal:
    """The record of one batch, or, without `batch`, of all that a pool knows, each job as "BATCH/JOB".

    Safe to use from several threads.
    """

    def __init__(self, database: Database, *, batch: str | None) -> None:
        self.database, self._batch = database, batch

    @classmethod
    def of_file(cls, file: Path) -> Self:
        """The journal of a batch that runs on this machine alone."""
        return cls(Database(file_url(file)), batch="")

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def put(self, key: str, value: Any) -> None:
        """Keeps a fact of the whole batch (a JSON value)."""
        self.put_all({key: value})

    def put_all(self, facts: Mapping[str, Any]) -> None:
        """Keeps several facts, all of them or none."""
        batch = self._batch or ""

        def act(connection: Connection) -> None:
            for key, value in facts.items():
                connection.execute(delete(FACTS).where(FACTS.c.batch == batch, FACTS.c.key == key))
                connection.execute(insert(FACTS).values(batch=batch, key=key, value=[_plain(value)]))

        self.database.write(act)

    def get(self, key: str, default: Any = None) -> Any:
        """A fact of the whole batch."""
        query = select(FACTS.c.value).where(FACTS.c.batch == (self._batch or ""), FACTS.c.key == key)
        found = self.database.read(lambda connection: connection.execute(query).scalar())
        return default if found is None else found[0]

    def drop_facts(self) -> None:
        """Forgets the facts of the whole batch."""
        query = delete(FACTS).where(FACTS.c.batch == (self._batch or ""))
        self.database.write(lambda connection: connection.execute(query))

    def jobs(self, *, batches: Collection[str] | None = None) -> dict[str, JobRecord]:
        """All jobs by name, in the order in which they were written first. batches: of a pool's, only these."""
        query = self._mine(select(JOBS), JOBS.c.batch).order_by(JOBS.c.number)
        if batches is not None:
            query = query.where(JOBS.c.batch.in_(sorted(batches)))
        rows = self.database.read(lambda connection: connection.execute(query).all())
        records = [_job_record(self._name(row.batch, row.name), row._mapping) for row in rows]
        return {record.name: record for record in records}

    def write_job(self, name: str, **changes: Any) -> JobRecord:
        """Changes what is known of a job; `details` are merged into those that there are."""
        batch, job = self._parts(name)
        here = (JOBS.c.batch == batch) & (JOBS.c.name == job)

        def act(connection: Connection) -> JobRecord:
            row = connection.execute(select(JOBS).where(here)).one_or_none()
            record = JobRecord(name=name) if row is None else _job_record(name, row._mapping)
            details = {**record.details, **_plain(changes.get("details", {}))}
            record = replace(record, **{**changes, "details": details})
            values = {key: getattr(record, key) for key in ("status", "step", "message")} | {"details": details}
            if row is None:
                connection.execute(insert(JOBS).values(batch=batch, name=job, **values))
            else:
                connection.execute(update(JOBS).where(here).values(**values))
            return record

        return self.database.write(act)

    def start_segment(self, job: str, what: Mapping[str, Any]) -> int:
        """Writes down that a segment is about to start; returns its number."""
        batch, name = self._parts(job)
        key, started_s = uuid.uuid4().hex, time.time()

        def act(connection: Connection) -> int:
            number = connection.execute(select(SEGMENTS.c.id).where(SEGMENTS.c.key == key)).scalar()
            if number is None:
                row = {"key": key, "batch": batch, "job": name, "what": _plain(what), "started_s": started_s}
                number = connection.execute(insert(SEGMENTS).values(**row).returning(SEGMENTS.c.id)).scalar_one()
            return int(number)

        return self.database.write(act)

    def end_segment(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Writes down how a segment ended."""
        values = {"ended_s": time.time(), "outcome": _plain(outcome)}
        self.database.write(
            lambda connection: connection.execute(update(SEGMENTS).where(SEGMENTS.c.id == number).values(**values))
        )

    def segments(self, job: str | None = None) -> list[SegmentRecord]:
        """The segments that were started, of one job or of all, in that order.

        Those of one job are told as its own, also where another one's gang trained it.
        """
        query = self._mine(select(SEGMENTS), SEGMENTS.c.batch).order_by(SEGMENTS.c.id)
        if job is None:
            rows = self.database.read(lambda connection: connection.execute(query).all())
            return [segment_record(row, job=self._name(row.batch, row.job)) for row in rows]
        batch, name = self._parts(job)
        of_job = select(JOBS.c.details).where(JOBS.c.batch == batch, JOBS.c.name == name)
        query = query.where(SEGMENTS.c.batch == batch)

        def read(connection: Connection) -> list[Any]:
            leader = (connection.execute(of_job).scalar() or {}).get(LEADER, name)
            return list(connection.execute(query.where(SEGMENTS.c.job.in_({name, leader}))).all())

        records = [segment_record(row, job=row.job) for row in self.database.read(read)]
        mine = [r if r.job == name else _as_fellow(r, name) for r in records if name in (r.job, *_beside(r))]
        return [replace(record, job=job) for record in mine]

    def write_plan(self, content: Mapping[str, Any], *, why: str) -> None:
        """Keeps a plan, the newest last."""
        values = {"batch": self._batch or "", "made_s": time.time(), "why": why, "content": _plain(content)}
        self.database.write(lambda connection: connection.execute(insert(PLANS).values(**values)))

    def plans(self, *, since_s: float = 0.0) -> list[dict[str, Any]]:
        """The plans that were made since then, the first one first."""
        query = select(PLANS.c.content).where(PLANS.c.batch == (self._batch or ""), PLANS.c.made_s >= since_s)
        rows = self.database.read(lambda connection: connection.execute(query.order_by(PLANS.c.id)).scalars().all())
        return list(rows)

    def _mine(self, query: Select[Any], column: Any) -> Select[Any]:
        return query if self._batch is None else query.where(column == self._batch)

    def _parts(self, name: str) -> tuple[str, str]:
        if self._batch is not None:
            return self._batch, name
        batch, _, job = name.partition("/")
        assert job, f"{name} does not say which batch it is of"
        return batch, job

    def _name(self, batch: str, job: str) -> str:
        return job if self._batch is not None else f"{batch}/{job}"


def _plain(value: Any) -> Any:
    """What the database gives back: mappings of any kind become dicts, tuples lists."""
    return json.loads(json.dumps(value, default=dict))


def segment_record(row: Any, *, job: str) -> SegmentRecord:
    """A row of the segments as a record, under the name that the reader has for the job."""
    return SegmentRecord(
        id=row.id, job=job, what=row.what, started_s=row.started_s, ended_s=row.ended_s, outcome=row.outcome
    )


def _beside(record: SegmentRecord) -> Mapping[str, int]:
    """The jobs that a segment's gang trained beside its own, and the step from which."""
    return dict(record.what.get("fellows", {}))


def _as_fellow(record: SegmentRecord, job: str) -> SegmentRecord:
    """A segment of another job's as one of a job that its gang trained too."""
    what = {**record.what, "first_step": _beside(record)[job], "fellows": {}, "num_jobs": record.num_jobs}
    outcome = record.outcome
    if outcome is not None:
        outcome = outcome.get("fellows", {}).get(job) or {"status": outcome["status"], "message": outcome["message"]}
    return replace(record, what=what, outcome=outcome)


def _job_record(name: str, row: Mapping[Any, Any]) -> JobRecord:
    return JobRecord(name=name, status=row["status"], step=row["step"], message=row["message"], details=row["details"])


def begin(journal: Journal, jobs: Sequence[Job], *, faults: Mapping[str, str]) -> list[Job]:
    """Writes the jobs into the journal, keeping what is known of them; returns those that are left to be trained.

    A job that had failed gets another chance: whoever resumes a batch has mended something. faults: by job name, why a
    job cannot be trained at all.
    """
    known = journal.jobs()
    for job in jobs:
        if job.name not in known:
            journal.write_job(job.name)
        elif known[job.name].status not in (DONE, STOPPED):
            journal.write_job(job.name, status=WAITING, message="")
    for name, message in faults.items():
        if journal.jobs()[name].status not in (DONE, STOPPED):
            journal.write_job(name, status=FAILED, message=message)
    records: Mapping[str, Any] = journal.jobs()
    return [job for job in jobs if records[job.name].status == WAITING]
