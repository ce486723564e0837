"""A run of a batch on a pool: creating it, finding it again from its flow run, and resuming it after its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.codec import digest
from ringmaster.errors import InputError
from ringmaster.flows.batch.flow_runs import root_run, runs_fact
from ringmaster.flows.batch.run_folder import fresh_folder, is_batch, was_being_started
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.events import FIRST_PREDICTION, NEWEST_PREDICTION
from ringmaster.tasks.pool import requests as wishes
from ringmaster.tasks.pool.event_log import BatchEvents, LogPosition
from ringmaster.tasks.pool.requests import Requests
from ringmaster.tasks.pool.submissions import BatchStatus, Submission, Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import JobStatus, Journal

IS_OVER = "is_over"
"""Fact of a run: its follower has recorded and reported its end. Only then does running it again mean to resume it;
otherwise its process had died on the way.
"""


@dataclass(frozen=True, kw_only=True)
class PoolRun:
    """One run of a batch on a pool.

    batch: the batch.
    id: id of its submission.
    folder: folder of the run, on storage that all nodes share.
    database: the pool's database.
    ledger: the pool's MLflow records.
    """

    batch: Batch
    id: str
    folder: Path
    database: Database
    ledger: Ledger

    @property
    def journal(self) -> Journal:
        """The journal of this run."""
        return Journal(self.database, batch=self.id)

    @property
    def submissions(self) -> Submissions:
        """All batches of the pool."""
        return Submissions(self.database)

    def ask(self, kind: wishes.RequestKind, **more: str) -> None:
        """Sends the controller a request about the whole batch."""
        Requests(self.database).ask(kind, {"batch": self.id, "jobs": [], **more})

    def has_ended(self) -> bool:
        """Returns whether all jobs have ended, and all their events are in the log."""
        return self.submissions.status(self.id) == BatchStatus.ENDED


def reopen(run: PoolRun, submission: Submission) -> LogPosition:
    """Resumes the jobs of a batch that were cancelled or paused, or have failed, after somebody has fixed the cause.

    Returns the position after the last event before that.
    """
    records = run.journal.jobs()
    if not run.has_ended():
        if any(record.status == JobStatus.PAUSED for record in records.values()):
            run.ask(wishes.RequestKind.RESUME)
        return LogPosition()
    # The controller has dropped a batch that has ended, and reads it again from here.
    # Some jobs may wait already: an earlier process that reopened the batch may have died on the way.
    again = [job.name for job in submission.jobs if records[job.name].status not in (JobStatus.DONE, JobStatus.STOPPED)]
    for name in again:
        run.journal.write_job(name, status=JobStatus.WAITING, message="")
    last = BatchEvents(run.database, run.id).newest()
    if again:
        for key in (FIRST_PREDICTION, NEWEST_PREDICTION):
            run.journal.remove(key)
        run.journal.put_all({"since_s": time.time(), "is_recorded": False, IS_OVER: False})
        run.submissions.reopen(run.id)
    return last


def place_of_run(batch: Batch, database: Database, *, home: Path, resume: bool) -> tuple[str, Path]:
    """Returns the id and folder of this run: those that this flow run had before, else the newest or new ones."""
    pool = Journal(database, batch="")
    root = root_run()
    known: Mapping[str, Any] = pool.get(runs_fact(root), {}) if root else {}
    which = f"{batch.name} {digest(batch.to_json())}"
    if which in known:
        key, folder = known[which]
        return str(key), Path(folder)
    found = newest_run(batch, database, home) if resume else None
    if found is None:  # also if the last run was killed before it reached the pool
        folder = fresh_folder(batch, home)
        found = f"{batch.name}-{folder.name}", folder
    key, folder = found
    if root:
        pool.put(runs_fact(root), {**known, which: [key, str(folder)]})
    return key, folder


def newest_run(batch: Batch, database: Database, home: Path) -> tuple[str, Path] | None:
    """Returns the newest run of the batch on the pool. Raises InputError if that run is done, or is of a changed file.

    Returns None if there is nothing to resume: the pool has no run, or the last one was killed before it reached the
    pool.
    """
    submissions = Submissions(database)
    mine = [key for key, name, _ in submissions.names() if name == batch.name]
    if not mine:
        return None
    same = [key for key in mine if is_batch(batch, Journal(database, batch=key).get("batch"))]
    if not same:
        raise InputError(
            [
                f"the batch file has changed since {mine[-1]}, so it cannot be resumed. "
                "To fix: undo the change, or leave out --resume to start afresh"
            ]
        )
    journal = Journal(database, batch=same[-1])
    is_done = all(record.status == JobStatus.DONE for record in journal.jobs().values())
    if is_done and journal.get("is_recorded") and submissions.status(same[-1]) == BatchStatus.ENDED:
        if was_being_started(batch, home):
            return None
        raise InputError([f"the last run of batch {batch.name!r} is done. To fix: leave out --resume to run it again"])
    submission = submissions.find(same[-1])
    assert submission is not None, "its name is there"
    return same[-1], submission.run_folder()
