"""Batches that were submitted to a pool: profiled already, to be included in the pool's plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select, update

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.execution.events import JobEnded
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.planning.problems.terms import Terms
from ringmaster.tasks.pool.event_log import keep
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.storage.schema import BATCHES, JOBS, json_field
from ringmaster.techniques import Job, Profile


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
    started_s: the start of the batch, from which its deadlines count.
    flow_run: the Prefect flow run under which the segments are shown; empty for none.
    """

    id: str
    name: str
    jobs: tuple[Job, ...]
    profiles: Mapping[str, tuple[Profile, ...]]
    folder: str
    cache_dir: str
    terms: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    import_paths: tuple[str, ...] = ()
    checkpoint_every_s: float | None = None
    checkpoint_root: str | None = None
    flow_run: str = ""
    started_s: float = 0.0
    together: Mapping[str, tuple[Profile, ...]] = field(default_factory=dict)

    @property
    def asked(self) -> Terms:
        """The objective, deadlines, weights and device price for its plans."""
        return Terms(**self.terms)

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
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Submits a batch; a batch that exists with the same id is left unchanged.

        failed: by job name, why a job cannot be trained at all. These jobs are recorded as failed, with an event in the
            event log.
        details: the details of the jobs' records, by job name.
        """
        faults, known = failed or {}, details or {}

        def act(connection: Connection) -> None:
            if connection.execute(select(BATCHES.c.id).where(BATCHES.c.id == submission.id)).first():
                return
            row = {"id": submission.id, "content": to_json(submission), "status": BatchStatus.SUBMITTED, "message": ""}
            connection.execute(insert(BATCHES).values(**row, submitted_s=time.time()))
            names = dict.fromkeys([*(job.name for job in submission.jobs), *faults])
            for name in names:
                stands = (
                    {"status": JobStatus.FAILED, "message": faults[name]}
                    if name in faults
                    else {"status": JobStatus.WAITING}
                )
                row = {
                    "batch": submission.id,
                    "name": name,
                    "step": 0,
                    "message": "",
                    "details": dict(known.get(name, {})),
                    **stands,
                }
                connection.execute(insert(JOBS).values(**row))
            for name, why in faults.items():
                keep(connection, submission.id, JobEnded(job=name, status=JobStatus.FAILED, message=why, details={}))

        self._database.write(act)

    def active(self) -> Mapping[str, str]:
        """Returns the flow run of each batch that has not ended, by the batch's id, oldest first; "" for no flow run.

        Unlike `standing`, it decodes no batch, which takes long for a thousand jobs.
        """
        query = select(BATCHES.c.id, json_field(BATCHES.c.content, "flow_run"))
        ordered = query.where(BATCHES.c.status == BatchStatus.SUBMITTED).order_by(BATCHES.c.submitted_s)
        rows = self._database.read(lambda connection: connection.execute(ordered).all())
        return {id: flow_run or "" for id, flow_run in rows}

    def flow_run(self, batch: str) -> str:
        """Returns the flow run under which the segments of a batch are shown; empty for none."""
        query = select(json_field(BATCHES.c.content, "flow_run")).where(BATCHES.c.id == batch)
        return self._database.read(lambda connection: connection.execute(query).scalar()) or ""

    def standing(self) -> Sequence[Submission]:
        """Returns the batches that have not ended, oldest first."""
        query = (
            select(BATCHES.c.content).where(BATCHES.c.status == BatchStatus.SUBMITTED).order_by(BATCHES.c.submitted_s)
        )
        rows = self._database.read(lambda connection: connection.execute(query).scalars().all())
        return [from_json(Submission, content) for content in rows]

    def find(self, batch: str) -> Submission | None:
        """Returns the batch with that id, or None."""
        query = select(BATCHES.c.content).where(BATCHES.c.id == batch)
        content = self._database.read(lambda connection: connection.execute(query).scalar())
        return None if content is None else from_json(Submission, content)

    def status(self, batch: str) -> BatchStatus | None:
        """Returns the state of a batch; None if there is no such batch."""
        query = select(BATCHES.c.status).where(BATCHES.c.id == batch)
        found = self._database.read(lambda connection: connection.execute(query).scalar())
        return None if found is None else BatchStatus(found)

    def names(self) -> Sequence[tuple[str, str, str]]:
        """Returns (id, name, status) of every batch that was ever submitted, oldest first."""
        query = select(BATCHES.c.id, json_field(BATCHES.c.content, "name"), BATCHES.c.status)
        ordered = query.order_by(BATCHES.c.submitted_s)
        rows = self._database.read(lambda connection: connection.execute(ordered).all())
        return [(row[0], row[1] or row[0], row[2]) for row in rows]

    def folders(self) -> Mapping[str, str]:
        """Returns the folder of the run of every batch that was ever submitted, by its id."""
        query = select(BATCHES.c.id, BATCHES.c.content["folder"].as_string())
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return {row[0]: row[1] for row in rows}

    def flow_runs(self) -> set[str]:
        """Returns the ids of the flow runs that have submitted a batch."""
        query = select(json_field(BATCHES.c.content, "flow_run"))
        return set(self._database.read(lambda connection: connection.execute(query).scalars().all()))

    def all(self) -> Sequence[tuple[Submission, str]]:
        """Returns every batch that was ever submitted, with its status, oldest first."""
        query = select(BATCHES.c.content, BATCHES.c.status).order_by(BATCHES.c.submitted_s)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [(from_json(Submission, row.content), row.status) for row in rows]

    def end(self, batch: str, *, message: str = "") -> None:
        """Marks a batch as ended, once all of its jobs have ended. message: why the pool has refused it, if so."""
        self._set(batch, BatchStatus.ENDED, message=message)

    def reopen(self, batch: str) -> None:
        """Marks an ended batch as submitted again, as some of its jobs continue."""
        self._set(batch, BatchStatus.SUBMITTED)

    def _set(self, batch: str, status: BatchStatus, *, message: str = "") -> None:
        values = {"status": status, "message": message}
        self._database.write(
            lambda connection: connection.execute(update(BATCHES).where(BATCHES.c.id == batch).values(**values))
        )
