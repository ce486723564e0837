"""What the database of a batch or a pool holds of a stretch of time: the queries behind chronicles."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, or_, select

from ringmaster.tasks.execution.journal import ENDED, JobRecord, SegmentRecord, segment_record
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.schema import BATCHES, FACTS, JOBS, NODES, PLANS, SAID, SEGMENTS
from ringmaster.tasks.pool.submissions import SUBMITTED


@dataclass(frozen=True)
class Head:
    """A plan in the database: when and why it was made."""

    id: int
    made_s: float
    why: str


class Archive:
    """Reads one batch that runs by itself, or a whole pool, whose jobs are called "BATCH/JOB". Times since the epoch.

    clock: now.
    """

    def __init__(self, database: Database, *, is_pool: bool, clock: Callable[[], float] = time.time) -> None:
        self.database, self.is_pool, self.clock = database, is_pool, clock

    def signature(self) -> tuple[str, ...]:
        """Changes whenever something has happened."""
        queries: list[Select[Any]] = [
            select(func.max(PLANS.c.id)),
            select(func.count(SEGMENTS.c.id), func.count(SEGMENTS.c.ended_s)),
            select(JOBS.c.status, func.count(), func.sum(JOBS.c.step)).group_by(JOBS.c.status).order_by(JOBS.c.status),
            select(BATCHES.c.id, BATCHES.c.status).order_by(BATCHES.c.id),
            select(func.max(SAID.c.id)),
            select(NODES.c.name, NODES.c.incarnation, NODES.c.status, NODES.c.health).order_by(NODES.c.name),
        ]
        rows = self.database.read(lambda connection: [connection.execute(query).all() for query in queries])
        return tuple(str(row) for row in rows)

    def num_left(self, batch: str | None) -> int:
        """How many jobs have not ended, of all or of one batch of a pool."""
        query = select(func.count()).where(JOBS.c.status.not_in(ENDED))
        number: int = self._rows(query if batch is None else query.where(JOBS.c.batch == batch))[0][0]
        return number

    def fact(self, key: str, default: Any = None) -> Any:
        """A fact of the batch that runs by itself."""
        found = self._rows(select(FACTS.c.value).where(FACTS.c.batch == "", FACTS.c.key == key))
        return found[0].value[0] if found else default

    def window(self, batch: str | None) -> tuple[float, Collection[str]]:
        """Of a pool: since when it is told, and of which batches: those that go on and `batch`, or the newest one."""
        rows = self._rows(select(BATCHES.c.id, BATCHES.c.submitted_s, BATCHES.c.status))
        shown = [row for row in rows if row.status == SUBMITTED or row.id == batch]
        shown = shown or sorted(rows, key=lambda row: row.submitted_s)[-1:]
        since_s = min((row.submitted_s for row in shown), default=self.clock())
        return since_s, {row.id for row in rows if row.submitted_s >= since_s}

    def heads(self, *, since_s: float) -> list[Head]:
        """The plans that were made since then, and if there is none, the newest one."""
        query = select(PLANS.c.id, PLANS.c.made_s, PLANS.c.why).where(PLANS.c.batch == "").order_by(PLANS.c.id)
        rows = self._rows(query.where(PLANS.c.made_s >= since_s))
        newest = query.order_by(None).order_by(PLANS.c.id.desc()).limit(1)
        return [Head(row.id, row.made_s, row.why) for row in rows or self._rows(newest)]

    def plan(self, number: int) -> tuple[Plan, Problem]:
        """A plan with its problem."""
        content = self._rows(select(PLANS.c.content).where(PLANS.c.id == number))[0].content
        return Plan.from_json(content["plan"]), Problem.from_json(content["problem"])

    def jobs(self, batches: Collection[str]) -> dict[str, JobRecord]:
        """The jobs of some batches, in the order in which they were written first."""
        rows = self._rows(select(JOBS).where(JOBS.c.batch.in_(batches)).order_by(JOBS.c.number))
        records = [
            JobRecord(name=self._name(row.batch, row.name), status=row.status, step=row.step, message=row.message)
            for row in rows
        ]
        return {record.name: record for record in records}

    def segments(self, batches: Collection[str], *, since_s: float) -> list[SegmentRecord]:
        """The segments of some batches that run, or have ended since then."""
        query = select(SEGMENTS).where(SEGMENTS.c.batch.in_(batches)).order_by(SEGMENTS.c.id)
        rows = self._rows(query.where(or_(SEGMENTS.c.ended_s.is_(None), SEGMENTS.c.ended_s >= since_s)))
        return [segment_record(row, job=self._name(row.batch, row.job)) for row in rows]

    def totals(self, batches: Collection[str]) -> dict[str, int | None]:
        """Steps of each job in all, where they are written down."""
        if not self.is_pool:
            return {job["name"]: job.get("num_steps") for job in self.fact("batch", {}).get("jobs", ())}
        rows = self._rows(select(BATCHES.c.id, BATCHES.c.content).where(BATCHES.c.id.in_(batches)))
        return {f"{row.id}/{job['name']}": job["num_steps"] for row in rows for job in row.content["jobs"]}

    def words(self, segments: Collection[int], *, after: int, most: int) -> tuple[int, list[tuple[int, Any]]]:
        """What gangs of some segments have said after a word, of the newest `most`; before it, the newest's number."""
        newest: int = self._rows(select(func.max(SAID.c.id)))[0][0] or 0
        after = max(after, newest - most)
        if not segments or newest <= after:
            return newest, []
        query = select(SAID.c.segment, SAID.c.content).where(SAID.c.id > after, SAID.c.segment.in_(segments))
        return newest, [(row.segment, row.content) for row in self._rows(query.order_by(SAID.c.id))]

    def _rows(self, query: Select[Any]) -> Sequence[Any]:
        return self.database.read(lambda connection: connection.execute(query).all())

    def _name(self, batch: str, job: str) -> str:
        return f"{batch}/{job}" if self.is_pool else job
