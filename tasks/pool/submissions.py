"""Batches that were submitted to a pool: measured already, waiting for their place in the standing plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select, update

from ringmaster.tasks.execution.events import JobEnded
from ringmaster.tasks.execution.journal import FAILED, WAITING
from ringmaster.tasks.planning.terms import Terms
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.schema import BATCHES, JOBS
from ringmaster.tasks.pool.told import keep
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.values import from_json, to_json

SUBMITTED, ENDED = "submitted", "ended"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A batch that is to be run by a pool.

    id: unique in the pool, without "/"; the run of the flow that submitted it, so that a retry finds it again.
    name: the batch's. jobs: with their steps resolved. profiles, data (the prepared data that it was surveyed with),
    weights (folders of base models outside of the batch): by job name. together: by the job that leads a group, what
    that can run under, its fellows among the profiles' own.
    folder: of this run, on storage that all nodes share: models, logs, and checkpoints where there is no root of their
    own. started_s: when the batch was started, from which its deadlines count.
    flow_run: Prefect's, under which the segments are shown; empty for none.
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
        """What is asked of its plans."""
        return Terms(**self.terms)

    def qualified(self, job: str) -> str:
        """A job's name in the pool."""
        return f"{self.id}/{job}"

    def run_folder(self) -> Path:
        """The folder of this run."""
        return Path(self.folder)


class Submissions:
    """The batches of a pool."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(
        self,
        submission: Submission,
        *,
        failed: Mapping[str, str] | None = None,
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hands a batch over; one of the same id that is there already is left as it is.

        failed: by job name, why it cannot be trained at all; those jobs are recorded as failed, and told to have.
        details: of their records, by job name.
        """
        faults, known = failed or {}, details or {}

        def act(connection: Connection) -> None:
            if connection.execute(select(BATCHES.c.id).where(BATCHES.c.id == submission.id)).first():
                return
            row = {"id": submission.id, "content": to_json(submission), "status": SUBMITTED, "message": ""}
            connection.execute(insert(BATCHES).values(**row, submitted_s=time.time()))
            names = dict.fromkeys([*(job.name for job in submission.jobs), *faults])
            for name in names:
                stands = {"status": FAILED, "message": faults[name]} if name in faults else {"status": WAITING}
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
                keep(connection, submission.id, JobEnded(job=name, status=FAILED, message=why, details={}))

        self._database.write(act)

    def standing(self) -> Sequence[Submission]:
        """The batches that have not ended, oldest first."""
        query = select(BATCHES.c.content).where(BATCHES.c.status == SUBMITTED).order_by(BATCHES.c.submitted_s)
        rows = self._database.read(lambda connection: connection.execute(query).scalars().all())
        return [from_json(Submission, content) for content in rows]

    def find(self, batch: str) -> Submission | None:
        """The batch of that id, or None."""
        query = select(BATCHES.c.content).where(BATCHES.c.id == batch)
        content = self._database.read(lambda connection: connection.execute(query).scalar())
        return None if content is None else from_json(Submission, content)

    def status(self, batch: str) -> str | None:
        """SUBMITTED or ENDED; None where there is no such batch."""
        query = select(BATCHES.c.status).where(BATCHES.c.id == batch)
        found: str | None = self._database.read(lambda connection: connection.execute(query).scalar())
        return found

    def names(self) -> Sequence[tuple[str, str, str]]:
        """(id, name, status) of every batch that was ever submitted, oldest first."""
        query = select(BATCHES.c.id, BATCHES.c.content["name"].as_string(), BATCHES.c.status)
        ordered = query.order_by(BATCHES.c.submitted_s)
        rows = self._database.read(lambda connection: connection.execute(ordered).all())
        return [(row[0], row[1], row[2]) for row in rows]

    def flow_runs(self) -> set[str]:
        """The flow runs that have submitted a batch, by their ids."""
        query = select(BATCHES.c.content["flow_run"].as_string())
        return set(self._database.read(lambda connection: connection.execute(query).scalars().all()))

    def all(self) -> Sequence[tuple[Submission, str]]:
        """Every batch that was ever submitted, with its status, oldest first."""
        query = select(BATCHES.c.content, BATCHES.c.status).order_by(BATCHES.c.submitted_s)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [(from_json(Submission, row.content), row.status) for row in rows]

    def end(self, batch: str) -> None:
        """All jobs of the batch have ended."""
        self._set(batch, ENDED)

    def reopen(self, batch: str) -> None:
        """Some of its jobs go on."""
        self._set(batch, SUBMITTED)

    def _set(self, batch: str, status: str) -> None:
        self._database.write(
            lambda connection: connection.execute(update(BATCHES).where(BATCHES.c.id == batch).values(status=status))
        )
