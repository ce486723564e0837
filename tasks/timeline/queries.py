"""The database queries behind run timelines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, or_, select

from ringmaster.tasks.execution.events import NEWEST_PREDICTION, Prediction, predictions_in
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.pool.submissions import BatchStatus
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import ENDED, JobRecord, SegmentRecord, segment_record
from ringmaster.tasks.storage.schema import BATCHES, FACTS, JOBS, NODES, PLANS, SAID, SEGMENTS
from ringmaster.techniques.processes.events import Event, event_or_refusal


@dataclass(frozen=True)
class Head:
    """A plan in the database: when and why it was made."""

    id: int
    made_s: float
    why: str


class Archive:
    """Reads a batch that runs alone, or a whole pool, whose jobs are named "BATCH/JOB". Times are since the epoch.

    clock: returns the current time.
    """

    def __init__(self, database: Database, *, is_pool: bool, clock: Callable[[], float] = time.time) -> None:
        self.database, self.is_pool, self.clock = database, is_pool, clock

    def signature(self) -> tuple[str, ...]:
        """Returns a value that changes whenever something has happened."""
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
        """Returns how many jobs have not ended, of all or of one batch of a pool."""
        query = select(func.count()).where(JOBS.c.status.not_in(ENDED))
        number: int = self._rows(query if batch is None else query.where(JOBS.c.batch == batch))[0][0]
        return number

    def fact(self, key: str, default: Any = None) -> Any:
        """Returns a fact of a batch that runs alone."""
        found = self._rows(select(FACTS.c.value).where(FACTS.c.batch == "", FACTS.c.key == key))
        return found[0].value[0] if found else default

    def predictions(self, batches: Collection[str]) -> dict[str, Prediction]:
        """Returns the newest prediction for each of some batches."""
        query = select(FACTS.c.batch, FACTS.c.value).where(FACTS.c.batch.in_(batches), FACTS.c.key == NEWEST_PREDICTION)
        found = {row.batch: predictions_in({NEWEST_PREDICTION: row.value[0]})[1] for row in self._rows(query)}
        return {batch: prediction for batch, prediction in found.items() if prediction is not None}

    def window(self, batch: str | None) -> tuple[float, Collection[str]]:
        """Returns the batches of a pool to show, and the time from which on.

        Shows the unfinished batches and `batch`, or the newest batch if there are none, and every batch submitted since
        then.
        """
        rows = self._rows(select(BATCHES.c.id, BATCHES.c.submitted_s, BATCHES.c.status))
        shown = [row for row in rows if row.status == BatchStatus.SUBMITTED or row.id == batch]
        shown = shown or sorted(rows, key=lambda row: row.submitted_s)[-1:]
        since_s = min((row.submitted_s for row in shown), default=self.clock())
        return since_s, {row.id for row in rows if row.submitted_s >= since_s}

    def heads(self, *, since_s: float) -> list[Head]:
        """Returns the plans that were made since `since_s`, or else the newest one."""
        query = select(PLANS.c.id, PLANS.c.made_s, PLANS.c.why).where(PLANS.c.batch == "").order_by(PLANS.c.id)
        rows = self._rows(query.where(PLANS.c.made_s >= since_s))
        newest = query.order_by(None).order_by(PLANS.c.id.desc()).limit(1)
        return [Head(row.id, row.made_s, row.why) for row in rows or self._rows(newest)]

    def plan(self, number: int) -> tuple[Plan, Problem]:
        """Returns a plan with its problem."""
        content = self._rows(select(PLANS.c.content).where(PLANS.c.id == number))[0].content
        return Plan.from_json(content["plan"]), Problem.from_json(content["problem"])

    def jobs(self, batches: Collection[str]) -> dict[str, JobRecord]:
        """Returns the jobs of some batches, in the order in which they were first written."""
        rows = self._rows(select(JOBS).where(JOBS.c.batch.in_(batches)).order_by(JOBS.c.number))
        records = [
            JobRecord(name=self._name(row.batch, row.name), status=row.status, step=row.step, message=row.message)
            for row in rows
        ]
        return {record.name: record for record in records}

    def segments(self, batches: Collection[str], *, since_s: float) -> list[SegmentRecord]:
        """Returns the segments of some batches that run or have ended since `since_s`."""
        query = select(SEGMENTS).where(SEGMENTS.c.batch.in_(batches)).order_by(SEGMENTS.c.id)
        rows = self._rows(query.where(or_(SEGMENTS.c.ended_s.is_(None), SEGMENTS.c.ended_s >= since_s)))
        return [segment_record(row, job=self._name(row.batch, row.job)) for row in rows]

    def totals(self, batches: Collection[str]) -> dict[str, int | None]:
        """Returns the number of steps of each job, None if it is not recorded."""
        if not self.is_pool:
            return {job["name"]: job.get("num_steps") for job in self.fact("batch", {}).get("jobs", ())}
        rows = self._rows(select(BATCHES.c.id, BATCHES.c.content).where(BATCHES.c.id.in_(batches)))
        return {f"{row.id}/{job['name']}": job["num_steps"] for row in rows for job in row.content["jobs"]}

    def gang_events(self, segments: Collection[int], *, after: int, most: int) -> tuple[int, list[tuple[int, Event]]]:
        """Returns the events of the gangs of some segments after the event number `after`, among the newest `most`
        events.

        The result begins with the number of the newest event.
        """
        newest: int = self._rows(select(func.max(SAID.c.id)))[0][0] or 0
        after = max(after, newest - most)
        if not segments or newest <= after:
            return newest, []
        query = select(SAID.c.segment, SAID.c.content).where(SAID.c.id > after, SAID.c.segment.in_(segments))
        return newest, [(row.segment, event_or_refusal(row.content)) for row in self._rows(query.order_by(SAID.c.id))]

    def _rows(self, query: Select[Any]) -> Sequence[Any]:
        return self.database.read(lambda connection: connection.execute(query).all())

    def _name(self, batch: str, job: str) -> str:
        return f"{batch}/{job}" if self.is_pool else job
