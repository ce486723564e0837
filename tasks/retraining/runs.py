"""Database of retraining runs and their progress: that of the pool, or a file of this home.

A run is identified by its name and date. The process that begins a run holds it, so that no two processes work on the
same run, or on two runs of the same models, at once. The results of a run are saved step by step. The next process that
begins the same run continues from there; a run that is over stays unchanged.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import psutil
from sqlalchemy import JSON, BigInteger, Column, Float, MetaData, Table, Text, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from ringmaster.errors import RetrainingInProgress
from ringmaster.tasks.background_worker import running
from ringmaster.tasks.retraining.selection import Clock
from ringmaster.tasks.storage.database import Database

METADATA = MetaData()
RUNS = Table(
    "retraining_nights",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("night", Text, primary_key=True),
    Column("status", Text, nullable=False),
    Column("began_s", Float, nullable=False),
    Column("content", JSON, nullable=False),
)
# The process that works on the runs of a file of models, one row a name. beats: its heartbeat counter, incremented
# while the holder lives.
HOLDERS = Table(
    "retraining_holders",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("token", Text, nullable=False),
    Column("night", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("born_s", Float, nullable=False),
    Column("beats", BigInteger, nullable=False),
)


class RetrainingStatus(StrEnum):
    """The states of a retraining run."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"
    LATE = "late"


OVER = (RetrainingStatus.DONE, RetrainingStatus.FAILED)
BEAT_S = 5.0
SILENCE_S = 20.0  # the time without a heartbeat after which a holder on another machine counts as dead


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A retraining run.

    status: "running" (also after a crash), "interrupted", "done" or "failed"; the last two are over. "skipped" and
        "late" are not stored: a later run has begun already, or the run would begin after its deadline.
    began_s: when the run first began, in seconds since the epoch.
    content: the results by step.
    """

    name: str
    run_date: str
    status: str = RetrainingStatus.RUNNING
    began_s: float = 0.0
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether the run has nothing left to do."""
        return self.status in OVER


class RetrainingRuns:
    """All retraining runs in `database`. clock: returns the time at which a run begins."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database, self._clock = database, clock
        database.write(lambda connection: METADATA.create_all(connection))

    def find(self, name: str, run_date: str) -> RunRecord | None:
        """Returns a run, or None if it was not begun."""
        rows = self._rows(name)
        return next((row for row in rows if row.run_date == run_date), None)

    def before(self, name: str, run_date: str) -> RunRecord | None:
        """Returns the last run before the given date, or None."""
        return next((row for row in reversed(self._rows(name)) if row.run_date < run_date), None)

    def after(self, name: str, run_date: str) -> RunRecord | None:
        """Returns the last run after the given date, or None."""
        return next((row for row in reversed(self._rows(name)) if row.run_date > run_date), None)

    def every(self, name: str) -> list[RunRecord]:
        """Returns all runs of a name, the oldest first."""
        return self._rows(name)

    def begin(self, name: str, run_date: str) -> RunRecord:
        """Returns the run, after beginning it if it was not begun yet."""
        if (known := self.find(name, run_date)) is not None:
            return known
        record = RunRecord(name=name, run_date=run_date, began_s=self._clock())
        try:
            self._database.write(lambda connection: connection.execute(insert(RUNS).values(**_row(record))))
        except IntegrityError:  # a commit whose answer was lost is retried
            record = self.find(name, run_date) or record
        return record

    def save(self, record: RunRecord) -> None:
        """Saves the status and content of a run."""
        values = {"status": record.status, "content": json.loads(json.dumps(record.content, default=dict))}
        where = (RUNS.c.name == record.name) & (RUNS.c.night == record.run_date)
        self._database.write(lambda connection: connection.execute(update(RUNS).where(where).values(**values)))

    @contextmanager
    def held(self, name: str, run_date: str, *, silence_s: float = SILENCE_S, beat_s: float = BEAT_S) -> Iterator[None]:
        """Context manager that holds the runs of a name for this process. Raises RetrainingInProgress if another
        process holds them.

        A dead holder is ignored: on this machine its process has ended, on another one it sends no heartbeat for
        `silence_s`.
        """
        token = self._take(name, run_date, silence_s=silence_s)
        try:
            with running(partial(self._beat, token, beat_s), name="night"):
                yield
        finally:
            self._drop(HOLDERS.c.token == token)

    def _take(self, name: str, run_date: str, *, silence_s: float) -> str:
        mine = _holder() | {"name": name, "night": run_date}
        while (found := self._holder_of(name)) is not None:
            if self._lives(found, silence_s=silence_s):
                raise RetrainingInProgress(
                    f"the run {found['night']} of {name} is in progress in process {found['pid']} on {found['host']}. "
                    "To fix: wait for its end"
                )
            self._drop((HOLDERS.c.token == found["token"]) & (HOLDERS.c.beats == found["beats"]))
        try:
            self._database.write(lambda connection: connection.execute(insert(HOLDERS).values(**mine)))
        except IntegrityError:  # another process was faster, or a commit whose answer was lost is retried
            if (now := self._holder_of(name)) is None or now["token"] != mine["token"]:
                raise RetrainingInProgress(f"a run of {name} was begun by another process just now") from None
        return str(mine["token"])

    def _lives(self, row: Mapping[str, Any], *, silence_s: float) -> bool:
        if row["host"] == platform.node():
            return _runs(row["pid"], born_s=row["born_s"])
        threading.Event().wait(silence_s)
        now = self._holder_of(row["name"])
        return now is not None and (now["token"], now["beats"]) != (row["token"], row["beats"])

    def _beat(self, token: str, beat_s: float, is_done: threading.Event) -> None:
        beat = update(HOLDERS).where(HOLDERS.c.token == token).values(beats=HOLDERS.c.beats + 1)
        while not is_done.wait(beat_s):
            self._database.write(lambda connection: connection.execute(beat))

    def _drop(self, where: Any) -> None:
        self._database.write(lambda connection: connection.execute(delete(HOLDERS).where(where)))

    def _holder_of(self, name: str) -> Mapping[str, Any] | None:
        query = select(HOLDERS).where(HOLDERS.c.name == name)
        row = self._database.read(lambda connection: connection.execute(query).mappings().first())
        return None if row is None else dict(row)

    def _rows(self, name: str) -> list[RunRecord]:
        query = select(RUNS).where(RUNS.c.name == name).order_by(RUNS.c.night)
        rows = self._database.read(lambda connection: connection.execute(query).mappings().all())
        return [_record(dict(row)) for row in rows]


def _row(record: RunRecord) -> dict[str, Any]:
    row = dict(vars(record))
    return {"night": row.pop("run_date"), **row}


def _record(row: dict[str, Any]) -> RunRecord:
    return RunRecord(run_date=row.pop("night"), **row)


def _holder() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "token": uuid.uuid4().hex,
        "host": platform.node(),
        "pid": pid,
        "born_s": psutil.Process(pid).create_time(),
        "beats": 0,
    }


def _runs(pid: int, *, born_s: float) -> bool:
    """Whether the same process still runs on this machine, rather than a later one with its pid."""
    try:
        process = psutil.Process(pid)
        is_the_same = abs(float(process.create_time()) - born_s) < 1.0
        return is_the_same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
