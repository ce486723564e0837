"""What happened to a batch, written down before it is acted on: the batch goes on from here after any crash.

One SQLite file a batch (write-ahead log, synced at each transaction). Times are seconds since the epoch.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from techniques import Job

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY, status TEXT NOT NULL, step INTEGER NOT NULL, message TEXT NOT NULL, details TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS segments (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, what TEXT NOT NULL, started_s REAL NOT NULL,
    ended_s REAL, outcome TEXT
);
CREATE TABLE IF NOT EXISTS plans (
    id INTEGER PRIMARY KEY, made_s REAL NOT NULL, why TEXT NOT NULL, content TEXT NOT NULL
);
"""


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


class Journal:
    """The record of one batch. Safe to use from several threads; one process writes at a time."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=30)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def put(self, key: str, value: Any) -> None:
        """Keeps a fact of the whole batch (a JSON value)."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value)))

    def get(self, key: str, default: Any = None) -> Any:
        """A fact of the whole batch."""
        with self._transaction() as db:
            row = db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return default if row is None else json.loads(row[0])

    def jobs(self) -> dict[str, JobRecord]:
        """All jobs by name, in the order in which they were written first."""
        with self._transaction() as db:
            rows = db.execute("SELECT name, status, step, message, details FROM jobs ORDER BY rowid").fetchall()
        return {
            name: JobRecord(name=name, status=status, step=step, message=message, details=json.loads(details))
            for name, status, step, message, details in rows
        }

    def write_job(self, name: str, **changes: Any) -> JobRecord:
        """Changes what is known of a job; `details` are merged into those that there are."""
        with self._transaction() as db:
            row = db.execute("SELECT status, step, message, details FROM jobs WHERE name = ?", (name,)).fetchone()
            record = JobRecord(name=name)
            if row is not None:
                record = replace(record, status=row[0], step=row[1], message=row[2], details=json.loads(row[3]))
            changes["details"] = {**record.details, **changes.get("details", {})}
            record = replace(record, **changes)
            db.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET status = excluded.status, "
                "step = excluded.step, message = excluded.message, details = excluded.details",
                (name, record.status, record.step, record.message, json.dumps(dict(record.details))),
            )
        return record

    def start_segment(self, job: str, what: Mapping[str, Any]) -> int:
        """Writes down that a segment is about to start; returns its number."""
        with self._transaction() as db:
            cursor = db.execute(
                "INSERT INTO segments (job, what, started_s) VALUES (?, ?, ?)",
                (job, json.dumps(dict(what)), time.time()),
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def end_segment(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Writes down how a segment ended."""
        with self._transaction() as db:
            db.execute(
                "UPDATE segments SET ended_s = ?, outcome = ? WHERE id = ?",
                (time.time(), json.dumps(dict(outcome)), number),
            )

    def segments(self, job: str | None = None) -> list[SegmentRecord]:
        """The segments that were started, of one job or of all, in that order."""
        with self._transaction() as db:
            rows = db.execute("SELECT id, job, what, started_s, ended_s, outcome FROM segments ORDER BY id").fetchall()
        return [
            SegmentRecord(
                id=number,
                job=name,
                what=json.loads(what),
                started_s=started_s,
                ended_s=ended_s,
                outcome=None if outcome is None else json.loads(outcome),
            )
            for number, name, what, started_s, ended_s, outcome in rows
            if job in (None, name)
        ]

    def write_plan(self, content: Mapping[str, Any], *, why: str) -> None:
        """Keeps a plan, the newest last."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO plans (made_s, why, content) VALUES (?, ?, ?)",
                (time.time(), why, json.dumps(dict(content))),
            )

    def plans(self, *, since_s: float = 0.0) -> list[dict[str, Any]]:
        """The plans that were made for the batch since then, the first one first."""
        with self._transaction() as db:
            rows = db.execute("SELECT content FROM plans WHERE made_s >= ? ORDER BY id", (since_s,)).fetchall()
        return [json.loads(row[0]) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def begin(journal: Journal, jobs: Sequence[Job], *, faults: Mapping[str, str]) -> list[Job]:
    """Writes the jobs into the journal, keeping what is known of them; returns those that are left to be trained.

    A job that had failed gets another chance: whoever resumes a batch has mended something. faults: by job name, why a
    job cannot be trained at all.
    """
    known = journal.jobs()
    for job in jobs:
        if job.name not in known:
            journal.write_job(job.name)
        elif known[job.name].status != DONE:
            journal.write_job(job.name, status=WAITING, message="")
    for name, message in faults.items():
        if journal.jobs()[name].status != DONE:
            journal.write_job(name, status=FAILED, message=message)
    records: Mapping[str, Any] = journal.jobs()
    return [job for job in jobs if records[job.name].status == WAITING]
