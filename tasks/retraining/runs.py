"""Database of retraining runs and their progress: that of the pool, or a file of this home.

A run is identified by its name and date. The process that begins a run holds it, so that no two processes work on the
same run, or on two runs of the same models, at once. The results of a run are saved step by step. The next process that
begins the same run continues from there; a run that is over stays unchanged.
"""

import json
import platform
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Float, MetaData, Table, Text, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from ringmaster.codec import digest, from_json, stored_as, to_json
from ringmaster.errors import RetrainingInProgress
from ringmaster.files import sha256_of
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.process_identity import own_row, runs_here
from ringmaster.tasks.retraining.selection import Clock
from ringmaster.tasks.storage.database import Database
from ringmaster.techniques import DataSpec
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.techniques.data.file_patterns import matching, opened

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
    AHEAD = "ahead"


OVER = (RetrainingStatus.DONE, RetrainingStatus.FAILED)
BEAT_S = 5.0
SILENCE_S = 20.0  # the time without a heartbeat after which a holder on another machine counts as dead


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A retraining run.

    status: "running" (also after a crash), "interrupted", "done" or "failed"; the last two are over. "skipped", "late"
        and "ahead" are not stored: a later run has begun already, the run would begin after its deadline, or a run was
        begun under a date that is still to come.
    began_s: when the run first began, in seconds since the epoch.
    content: the results by step.
    """

    name: str
    run_date: str = stored_as("night")
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
        self._database, self.clock = database, clock
        database.write(lambda connection: METADATA.create_all(connection))

    def find(self, name: str, run_date: str) -> RunRecord | None:
        """Returns a run, or None if it was not begun."""
        return next((row for row in self.every(name) if row.run_date == run_date), None)

    def rounds(self, name: str, run_date: str) -> list[RunRecord]:
        """Returns the run of a date and its further rounds, in their order."""
        return [row for row in self.every(name) if row.run_date[:10] == run_date]

    def forget(self, name: str, run_date: str) -> None:
        """Removes the run of a date with its further rounds."""
        rows = RUNS.c.night.in_([row.run_date for row in self.rounds(name, run_date)])
        self._database.execute(delete(RUNS).where((RUNS.c.name == name) & rows))

    def before(self, name: str, run_date: str) -> RunRecord | None:
        """Returns the last run before the given date, or None."""
        return next((row for row in reversed(self.every(name)) if row.run_date < run_date), None)

    def after(self, name: str, run_date: str) -> RunRecord | None:
        """Returns the last run after the given date, or None."""
        return next((row for row in reversed(self.every(name)) if row.run_date > run_date), None)

    def begin(self, name: str, run_date: str) -> RunRecord:
        """Returns the run, after beginning it if it was not begun yet."""
        if (known := self.find(name, run_date)) is not None:
            return known
        record = RunRecord(name=name, run_date=run_date, began_s=self.clock())
        try:
            self._database.execute(insert(RUNS).values(**to_json(record)))
        except IntegrityError:  # a commit whose answer was lost is retried
            record = self.find(name, run_date) or record
        return record

    def save(self, record: RunRecord) -> None:
        """Saves the status and content of a run."""
        values = {"status": record.status, "content": json.loads(json.dumps(record.content, default=dict))}
        where = (RUNS.c.name == record.name) & (RUNS.c.night == record.run_date)
        self._database.execute(update(RUNS).where(where).values(**values))

    @contextmanager
    def held(self, name: str, run_date: str, *, silence_s: float = SILENCE_S, beat_s: float = BEAT_S) -> Iterator[None]:
        """Context manager that holds the runs of a name for this process. Raises RetrainingInProgress if another
        process holds them.

        A dead holder is ignored: on this machine its process has ended, on another one it sends no heartbeat for
        `silence_s`.
        """
        token = self._take(name, run_date, silence_s=silence_s)
        try:
            with background_thread(partial(self._beat, token, beat_s), name="night"):
                yield
        finally:
            self._drop(HOLDERS.c.token == token)

    def _take(self, name: str, run_date: str, *, silence_s: float) -> str:
        own = own_row() | {"beats": 0, "name": name, "night": run_date}
        while (result := self._holder_of(name)) is not None:
            if self._lives(result, silence_s=silence_s):
                raise RetrainingInProgress(
                    f"the run {result['night']} of {name} is in progress in process {result['pid']} on "
                    f"{result['host']}. To fix: wait for its end"
                )
            self._drop((HOLDERS.c.token == result["token"]) & (HOLDERS.c.beats == result["beats"]))
        try:
            self._database.execute(insert(HOLDERS).values(**own))
        except IntegrityError:  # another process was faster, or a commit whose answer was lost is retried
            if (now := self._holder_of(name)) is None or now["token"] != own["token"]:
                raise RetrainingInProgress(f"a run of {name} was begun by another process just now") from None
        return str(own["token"])

    def _lives(self, row: Mapping[str, Any], *, silence_s: float) -> bool:
        if row["host"] == platform.node():
            return runs_here(row["pid"], born_s=row["born_s"])
        threading.Event().wait(silence_s)
        now = self._holder_of(row["name"])
        return now is not None and (now["token"], now["beats"]) != (row["token"], row["beats"])

    def _beat(self, token: str, beat_s: float, is_done: threading.Event) -> None:
        beat = update(HOLDERS).where(HOLDERS.c.token == token).values(beats=HOLDERS.c.beats + 1)
        while not is_done.wait(beat_s):
            self._database.execute(beat)

    def _drop(self, where: Any) -> None:
        self._database.execute(delete(HOLDERS).where(where))

    def _holder_of(self, name: str) -> Mapping[str, Any] | None:
        query = select(HOLDERS).where(HOLDERS.c.name == name)
        row = self._database.read(lambda connection: connection.execute(query).mappings().first())
        return None if row is None else dict(row)

    def every(self, name: str) -> list[RunRecord]:
        """Returns all runs of a file of models, in the order of their dates."""
        query = select(RUNS).where(RUNS.c.name == name).order_by(RUNS.c.night)
        rows = self._database.read(lambda connection: connection.execute(query).mappings().all())
        return [from_json(RunRecord, row) for row in rows]


DATED = re.compile(r"(?<!\d)(\d{4})-?(\d{2})-?(\d{2})(?!\d)")


@dataclass(frozen=True, kw_only=True)
class FrozenData:
    """Data that no longer changes. files: (name, digest of the content) of each training file."""

    data: DataSpec
    files: tuple[tuple[str, str], ...] = ()


def freeze(spec: DataSpec, *, run_date: str, window_days: int | None, folder: Path) -> FrozenData:
    """Copies the current files of `spec` below `folder` and returns data that refers to the copies.

    Data without files is returned unchanged. window_days: of the files with a date in their name, such as 2026-11-20,
    only those of the last `window_days` days up to the run's own are copied; later ones belong to the next run. Files
    without a date are always copied. The folder of a copy is named after the state of its files, so that runs share
    equal copies. Raises ValueError if no file is left.
    """
    if spec.path is None:
        return FrozenData(data=spec)
    path, files = _copied(spec.path, folder=folder, run_date=run_date, window_days=window_days)
    held_out = None if spec.held_out_path is None else _copied(spec.held_out_path, folder=folder, run_date=run_date)[0]
    data = replace(
        spec,
        path=path,
        held_out_path=held_out,
        original_path=spec.path,
        original_held_out_path=spec.held_out_path,
    )
    return FrozenData(data=data, files=files)


def _copied(
    pattern: str, *, folder: Path, run_date: str, window_days: int | None = None
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Copies the files of a pattern or URL; returns a pattern for the copies, and the files with digests."""
    result = matching(pattern)
    if window_days is not None:
        last = date.fromisoformat(run_date)
        first = last - timedelta(days=window_days - 1)
        dates = {name: _date_in(name) for name in result.names}
        names = [name for name, day in dates.items() if day is None or first <= day <= last]
        if not names:
            there = _span(*(day for day in dates.values() if day is not None))
            raise ValueError(
                f"path {pattern!r} has no file dated {_span(first, last)}, only {there}: window_days: {window_days} "
                "ends with the date of the run. To fix: write a file of that date, or widen window_days"
            )
        result = replace(result, names=tuple(names))
    target = folder / digest([pattern, result.state()])
    if not target.is_dir():
        with publish(target) as aside:
            for name in result.names:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                with opened(result.path(name)) as source, (aside / name).open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
    # By content, as files that are fetched again each night are new to every stamp.
    files = tuple((name, sha256_of(target / name)) for name in result.names)
    if is_url(pattern):
        return str(target / (result.names[0] if len(result.names) == 1 else "**/*")), files
    return str(target / Path(pattern).relative_to(result.root)), files


def drop_others(folder: Path, *, keep: Iterable[str]) -> None:
    """Removes the copies below `folder`, except those that contain a path of `keep`."""
    kept = {Path(path).relative_to(folder).parts[0] for path in keep if Path(path).is_relative_to(folder)}
    for copy in folder.iterdir() if folder.is_dir() else ():
        if copy.name not in kept:
            shutil.rmtree(copy, ignore_errors=True)


def _span(*days: date) -> str:
    """Returns the first and the last of some dates for display."""
    return " to ".join(dict.fromkeys([min(days).isoformat(), max(days).isoformat()]))


def _date_in(name: str) -> date | None:
    """Returns the last date in a name; digits that form no date, such as 2026-13-45, are skipped."""
    for year, month, day in reversed(DATED.findall(name)):
        try:
            return date(int(year), int(month), int(day))
        except ValueError:
            continue
    return None
