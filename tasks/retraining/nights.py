"""The nights that were begun, and how far each got: in the database of the pool, or a file of this home.

A night is kept by its name and date. Whoever begins one holds it, so that no two processes work on it, nor on two
nights of the same models, at once. What a night has found out is saved step by step; the next process that begins it
goes on from there, and one that is over stays as it was.
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
from typing import Any

import psutil
from sqlalchemy import JSON, BigInteger, Column, Float, MetaData, Table, Text, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from ringmaster.model_lineage.faults import RingmasterError
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.retraining.dates import Clock

METADATA = MetaData()
NIGHTS = Table(
    "retraining_nights",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("night", Text, primary_key=True),
    Column("status", Text, nullable=False),
    Column("began_s", Float, nullable=False),
    Column("content", JSON, nullable=False),
)
# Who works on the nights of a file of models: a row a name. beats: counted up while the holder lives.
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
RUNNING, DONE, FAILED, INTERRUPTED, SKIPPED = "running", "done", "failed", "interrupted", "skipped"
OVER = (DONE, FAILED)
BEAT_S = 5.0
SILENCE_S = 20.0  # after which a holder on another machine, that has not beaten meanwhile, is taken for dead


class NightHeld(RingmasterError, ValueError):
    """Another process works on a night of the same models."""


@dataclass(frozen=True, kw_only=True)
class NightRecord:
    """A night. status: "running" (or left half-done), "interrupted", "done" or "failed"; the last two are over.

    began_s: when it was begun first, in seconds since the epoch. content: what is known of it, by step.
    """

    name: str
    night: str
    status: str = RUNNING
    began_s: float = 0.0
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do in it."""
        return self.status in OVER


class Nights:
    """All nights in `database`. clock: tells when one is begun."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database, self._clock = database, clock
        database.write(lambda connection: METADATA.create_all(connection))

    def find(self, name: str, night: str) -> NightRecord | None:
        """A night, None where it was not begun."""
        rows = self._rows(name)
        return next((row for row in rows if row.night == night), None)

    def before(self, name: str, night: str) -> NightRecord | None:
        """The last night before another one that was begun."""
        return next((row for row in reversed(self._rows(name)) if row.night < night), None)

    def after(self, name: str, night: str) -> NightRecord | None:
        """The last night after another one that was begun."""
        return next((row for row in reversed(self._rows(name)) if row.night > night), None)

    def every(self, name: str) -> list[NightRecord]:
        """All nights of a name, the oldest first."""
        return self._rows(name)

    def begin(self, name: str, night: str) -> NightRecord:
        """The night, begun now where it was not."""
        if (known := self.find(name, night)) is not None:
            return known
        record = NightRecord(name=name, night=night, began_s=self._clock())
        try:
            self._database.write(lambda connection: connection.execute(insert(NIGHTS).values(**vars(record))))
        except IntegrityError:  # a commit whose answer was lost is tried again
            record = self.find(name, night) or record
        return record

    def save(self, record: NightRecord) -> None:
        """Keeps a night as it is."""
        values = {"status": record.status, "content": json.loads(json.dumps(record.content, default=dict))}
        where = (NIGHTS.c.name == record.name) & (NIGHTS.c.night == record.night)
        self._database.write(lambda connection: connection.execute(update(NIGHTS).where(where).values(**values)))

    @contextmanager
    def held(self, name: str, night: str, *, silence_s: float = SILENCE_S, beat_s: float = BEAT_S) -> Iterator[None]:
        """Keeps other processes from the nights of a name. Raises NightHeld where one is at it.

        A holder that has died is passed over: on this machine by its process, on another one after `silence_s` without
        a beat.
        """
        token = self._take(name, night, silence_s=silence_s)
        is_done = threading.Event()
        beating = threading.Thread(target=self._beat, args=(token, is_done, beat_s), name="night", daemon=True)
        beating.start()
        try:
            yield
        finally:
            is_done.set()
            beating.join()
            self._drop(HOLDERS.c.token == token)

    def _take(self, name: str, night: str, *, silence_s: float) -> str:
        mine = _holder() | {"name": name, "night": night}
        while (found := self._holder_of(name)) is not None:
            if self._lives(found, silence_s=silence_s):
                raise NightHeld(
                    f"the night {found['night']} of {name} is under way in process {found['pid']} on {found['host']}. "
                    "To fix: wait for its end"
                )
            self._drop((HOLDERS.c.token == found["token"]) & (HOLDERS.c.beats == found["beats"]))
        try:
            self._database.write(lambda connection: connection.execute(insert(HOLDERS).values(**mine)))
        except IntegrityError:  # another process was quicker, or a commit whose answer was lost is tried again
            if (now := self._holder_of(name)) is None or now["token"] != mine["token"]:
                raise NightHeld(f"a night of {name} was begun by another process just now") from None
        return str(mine["token"])

    def _lives(self, row: Mapping[str, Any], *, silence_s: float) -> bool:
        if row["host"] == platform.node():
            return _runs(row["pid"], born_s=row["born_s"])
        threading.Event().wait(silence_s)
        now = self._holder_of(row["name"])
        return now is not None and (now["token"], now["beats"]) != (row["token"], row["beats"])

    def _beat(self, token: str, is_done: threading.Event, beat_s: float) -> None:
        beat = update(HOLDERS).where(HOLDERS.c.token == token).values(beats=HOLDERS.c.beats + 1)
        while not is_done.wait(beat_s):
            self._database.write(lambda connection: connection.execute(beat))

    def _drop(self, where: Any) -> None:
        self._database.write(lambda connection: connection.execute(delete(HOLDERS).where(where)))

    def _holder_of(self, name: str) -> Mapping[str, Any] | None:
        query = select(HOLDERS).where(HOLDERS.c.name == name)
        row = self._database.read(lambda connection: connection.execute(query).mappings().first())
        return None if row is None else dict(row)

    def _rows(self, name: str) -> list[NightRecord]:
        query = select(NIGHTS).where(NIGHTS.c.name == name).order_by(NIGHTS.c.night)
        rows = self._database.read(lambda connection: connection.execute(query).mappings().all())
        return [NightRecord(**row) for row in rows]


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
    """Whether a process of this machine still runs: that one, and no later one of its number."""
    try:
        process = psutil.Process(pid)
        is_the_same = abs(float(process.create_time()) - born_s) < 1.0
        return is_the_same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
