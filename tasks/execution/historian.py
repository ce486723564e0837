"""Reads chronicles from the database of a batch or a pool: as often as one likes, plans that it has read only once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from tasks.execution.chronicle import AT_FIRST, NOW_RUNNING, Chronicle, JobLine, NodeLine, Note, Span
from tasks.execution.dispatch import DeviceId
from tasks.execution.forecast import Standing, as_span, planned_end_s, to_come
from tasks.execution.journal import CANCELLED, DONE, ENDED, FAILED, PAUSED, JobRecord, Journal, SegmentRecord
from tasks.planning import Plan, Problem
from tasks.planning.drawing import seconds_text
from tasks.pool.database import Database
from tasks.pool.nodes import Nodes
from tasks.pool.schema import BATCHES, JOBS, NODES, PLANS, SAID, SEGMENTS
from tasks.pool.submissions import SUBMITTED

MOST_PLANS = 50  # that are read to find what was planned first for jobs that came later
MOST_STANDING = 5  # of the newest plans that are read for what is still to come
MOST_NOTES = 200
MOST_WORDS = 2000  # of running gangs that are read back when one begins to look
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Head:
    """A plan in the database: when and why it was made."""

    id: int
    made_s: float
    why: str


@dataclass
class _Pace:
    """How far a gang has told that it is, and how long its newest steps took."""

    step: int = 0
    step_s: float | None = None

    def hear(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "ready":
            self.step = max(self.step, event["step"])
        elif event["event"] == "steps":
            self.step = max(self.step, event["first_step"] + len(event["seconds"]))
            self.step_s = statistics.median(event["seconds"]) if event["seconds"] else self.step_s


class Historian:
    """Reads one batch that runs by itself, or a whole pool, whose jobs are called "BATCH/JOB".

    name: the chronicle's. clock: seconds since the epoch, as in the database.
    """

    def __init__(
        self, database: Database, *, name: str, is_pool: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._database, self._name, self._is_pool, self._clock = database, name, is_pool, clock
        self._journal = Journal(database, batch=None if is_pool else "")
        self._plans: dict[int, tuple[Plan, Problem]] = {}
        self._paces: dict[int, _Pace] = {}
        self._heard = 0

    def signature(self) -> tuple[Any, ...]:
        """Changes whenever something has happened that a chronicle shows."""
        queries = [
            select(func.max(PLANS.c.id)),
            select(func.count(SEGMENTS.c.id), func.count(SEGMENTS.c.ended_s)),
            select(JOBS.c.status, func.count(), func.sum(JOBS.c.step)).group_by(JOBS.c.status).order_by(JOBS.c.status),
            select(BATCHES.c.id, BATCHES.c.status).order_by(BATCHES.c.id),
            select(func.max(SAID.c.id)),
            select(NODES.c.name, NODES.c.incarnation, NODES.c.status, NODES.c.health).order_by(NODES.c.name),
        ]
        rows = self._database.read(lambda connection: [connection.execute(query).all() for query in queries])
        return tuple(str(row) for row in rows)

    def hear(self, number: int, event: Mapping[str, Any]) -> None:
        """What the gang of that segment said, where it is not in the database."""
        self._paces.setdefault(number, _Pace()).hear(event)

    def num_left(self, batch: str | None = None) -> int:
        """How many jobs have not ended, of all or of one batch of a pool."""
        query = select(func.count()).where(JOBS.c.status.not_in(ENDED))
        if batch is not None:
            query = query.where(JOBS.c.batch == batch)
        number: int = self._database.read(lambda connection: connection.execute(query).scalar_one())
        return number

    def read(self) -> Chronicle:
        """All that is known now."""
        records = self._journal.jobs()
        heads = self._heads()
        zero_s = self._zero_s(heads)
        now_s = self._clock() - zero_s
        segments = [record for record in self._journal.segments() if (record.ended_s or zero_s) >= zero_s]
        standing, first = self._standing(heads, records, zero_s), self._first(heads, records, zero_s)
        self._listen({record.id for record in segments if record.ended_s is None})
        past = [_span(record, zero_s) for record in segments if record.ended_s is not None]
        running = [
            self._running(record, zero_s, now_s, standing, records[record.job].step)
            for record in segments
            if record.ended_s is None
        ]
        status = None if self._is_pool else self._journal.get("status")
        is_over = _all_ended(records) or (status in (INTERRUPTED, DONE, FAILED) and not running)
        coming = [] if is_over else to_come(standing, past=past, running=running, now_s=now_s)
        nodes = Nodes(self._database).all() if self._is_pool else ()
        chronicle = Chronicle(
            name=self._name,
            zero_s=zero_s,
            now_s=now_s,
            first=tuple(first),
            past=tuple(past),
            running=tuple(running),
            coming=tuple(coming),
            jobs=tuple(self._lines(records, past, running, coming, segments)),
            notes=tuple(self._notes(heads, past, zero_s)),
            nodes=tuple(
                NodeLine(
                    name=n.name, num_devices=len(n.devices), status=n.status, health=tuple(sorted(n.health.items()))
                )
                for n in nodes
            ),
            is_over=is_over,
        )
        return _with_rows(chronicle, [self._plans[number][1] for number in sorted(self._plans)])

    # -- plans -------------------------------------------------------------------------------------------------------

    def _heads(self) -> Sequence[Head]:
        """Number, time and reason of each plan, since the batch was resumed last where it was."""
        query = select(PLANS.c.id, PLANS.c.made_s, PLANS.c.why).where(PLANS.c.batch == "").order_by(PLANS.c.id)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        heads = [Head(row.id, row.made_s, row.why) for row in rows]
        if self._is_pool:
            begin_s = self._pool_zero_s()
            return [head for head in heads if head.made_s >= begin_s] or heads[-1:]
        resumed = max((i for i, head in enumerate(heads) if head.why == "resumed"), default=0)
        return heads[resumed:]

    def _zero_s(self, heads: Sequence[Head]) -> float:
        if self._is_pool:
            return self._pool_zero_s()
        return heads[0].made_s if heads else self._clock()

    def _pool_zero_s(self) -> float:
        """When the oldest batch that has not ended was submitted, or where all have ended, the newest one."""
        query = select(BATCHES.c.submitted_s, BATCHES.c.status)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        standing = [row.submitted_s for row in rows if row.status == SUBMITTED]
        return min(standing) if standing else max((row.submitted_s for row in rows), default=self._clock())

    def _first(self, heads: Sequence[Head], records: Mapping[str, JobRecord], zero_s: float) -> list[Span]:
        """What was planned first for each job."""
        missing, first = set(records), list[Span]()
        for head in heads[:MOST_PLANS]:
            if not missing:
                break
            found = self._plan(head, zero_s)
            new = {segment.job for segment in found.plan.segments} & missing
            spans = [as_span(s, found.problem, from_s=found.made_s, status=AT_FIRST) for s in found.plan.segments]
            first += [span for span in spans if span.job in new]
            missing -= new
        return first

    def _standing(self, heads: Sequence[Head], records: Mapping[str, JobRecord], zero_s: float) -> dict[str, Standing]:
        """The plan that each job follows: the newest that knows it, as a new one may leave out what runs."""
        missing = {name for name, record in records.items() if record.status not in (*ENDED, PAUSED)}
        standing: dict[str, Standing] = {}
        for head in reversed(heads[-MOST_STANDING:]):
            if not missing:
                break
            found = self._plan(head, zero_s)
            standing |= dict.fromkeys({segment.job for segment in found.plan.segments} & missing, found)
            missing -= set(standing)
        return standing

    def _plan(self, head: Head, zero_s: float) -> Standing:
        if head.id not in self._plans:
            query = select(PLANS.c.content).where(PLANS.c.id == head.id)
            content = self._database.read(lambda connection: connection.execute(query).scalar_one())
            self._plans[head.id] = Plan.from_json(content["plan"]), Problem.from_json(content["problem"])
        plan, problem = self._plans[head.id]
        return Standing(plan=plan, problem=problem, made_s=head.made_s - zero_s)

    # -- what runs ---------------------------------------------------------------------------------------------------

    def _listen(self, running: set[int]) -> None:
        """Takes in what running gangs have said to the pool since one looked last."""
        newest = self._database.read(lambda connection: connection.execute(select(func.max(SAID.c.id))).scalar()) or 0
        after = max(self._heard, newest - MOST_WORDS)
        if running and newest > after:
            query = select(SAID.c.segment, SAID.c.content).where(SAID.c.id > after, SAID.c.segment.in_(running))
            rows = self._database.read(lambda connection: connection.execute(query.order_by(SAID.c.id)).all())
            for row in rows:
                self.hear(row.segment, row.content)
        self._heard = newest
        self._paces = {number: pace for number, pace in self._paces.items() if number in running}

    def _running(
        self, record: SegmentRecord, zero_s: float, now_s: float, standing: Mapping[str, Standing], step: int
    ) -> Span:
        span = _span(record, zero_s)
        begin_s, end_s = record.what.get("planned_s", (0.0, 0.0))
        ends_s = span.start_s + end_s - begin_s
        pace = self._paces.get(record.id)
        if pace is not None and pace.step_s is not None and pace.step < record.what["last_step"]:
            ends_s = now_s + (record.what["last_step"] - pace.step) * pace.step_s
        elif record.job in standing:
            ends_s = planned_end_s(standing[record.job], span) or ends_s
        done = max(step, pace.step if pace else 0) - record.what["first_step"]
        if ends_s <= now_s and done > 0:  # longer than was planned: it goes on as fast as it was
            left = record.what["last_step"] - record.what["first_step"] - done
            ends_s = now_s + left * (now_s - span.start_s) / done
        return Span(**{**vars(span), "end_s": max(now_s, ends_s), "status": NOW_RUNNING})

    # -- in words ----------------------------------------------------------------------------------------------------

    def _lines(
        self,
        records: Mapping[str, JobRecord],
        past: Sequence[Span],
        running: Sequence[Span],
        coming: Sequence[Span],
        segments: Sequence[SegmentRecord],
    ) -> list[JobLine]:
        steps = {r.job: max(r.what["first_step"], self._paces[r.id].step) for r in segments if r.id in self._paces}
        totals = self._totals()
        mine: dict[str, list[Span]] = {}
        for span in (*past, *running, *coming):
            mine.setdefault(span.job, []).append(span)
        newest: dict[str, Span] = {span.job: span for span in reversed(coming)}  # the next one, or ...
        newest |= {span.job: span for span in (*past, *running)}  # ... the one that began last
        lines = []
        for name, record in records.items():
            show = newest.get(name)
            lines.append(
                JobLine(
                    name=name,
                    status=record.status,
                    step=max(steps.get(name, 0), record.step),
                    num_steps=totals.get(name),
                    technique=show.technique if show else "",
                    num_devices=len(show.devices) if show else 0,
                    ends_s=max((span.end_s for span in mine.get(name, ())), default=None),
                    message=record.message,
                )
            )
        return lines

    def _totals(self) -> dict[str, int | None]:
        """Steps of each job in all, where they are written down."""
        if not self._is_pool:
            batch = self._journal.get("batch", {})
            return {job["name"]: job.get("num_steps") for job in batch.get("jobs", ())}
        query = select(BATCHES.c.id, BATCHES.c.content)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return {
            f"{r.id}/{job['name']}": job["num_steps"] for r in rows for job in r.content["jobs"] if job["num_steps"]
        }

    def _notes(self, heads: Sequence[Head], past: Sequence[Span], zero_s: float) -> list[Note]:
        notes = []
        for head in heads[-MOST_NOTES:]:
            known = self._plans.get(head.id)
            end = f": {seconds_text(known[0].makespan_s)} from then on" if known else ""
            notes.append(Note(at_s=head.made_s - zero_s, text=f"planned ({head.why}){end}"))
        for span in past:
            if span.status != DONE:
                said = f": {span.message}" if span.message else ""
                notes.append(Note(at_s=span.end_s, text=f"{span.job} {span.status.replace('_', ' ')}{said}"))
        return sorted(notes, key=lambda note: note.at_s)[-MOST_NOTES:]


def _span(record: SegmentRecord, zero_s: float) -> Span:
    outcome = record.outcome or {}
    return Span(
        job=record.job,
        technique=record.what["technique"],
        devices=tuple(_device(name) for name in record.what["devices"]),
        start_s=record.started_s - zero_s,
        end_s=(record.ended_s or record.started_s) - zero_s,
        status=outcome.get("status", NOW_RUNNING),
        number=record.id,
        message=outcome.get("message", ""),
    )


def _device(lease: str) -> DeviceId:
    """The device of a lease, which is called NODE:KIND:NUMBER."""
    node, _, number = lease.rsplit(":", 2)
    return node, int(number)


def _all_ended(records: Mapping[str, JobRecord]) -> bool:
    return bool(records) and all(record.status in (DONE, FAILED, CANCELLED) for record in records.values())


def _with_rows(chronicle: Chronicle, problems: Iterable[Problem]) -> Chronicle:
    """The same with a row for every device that there is or was."""
    rows = {node.id: node.num_devices for problem in problems for node in problem.nodes}
    rows |= {node.name: max(node.num_devices, rows.get(node.name, 0)) for node in chronicle.nodes}
    for span in (*chronicle.first, *chronicle.real):
        for node, device in span.devices:
            rows[node] = max(rows.get(node, 0), device + 1)
    return Chronicle(**{**vars(chronicle), "rows": tuple(rows.items())})
