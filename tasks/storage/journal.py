"""The journal of a batch: records each event before it is acted on, so that the batch can be resumed after any crash.

A batch on this machine has its own SQLite file; a pool has one database for all its batches. Times are seconds since
the epoch by the clock of the process that runs the batch or leads the pool, which has recorded that clock.
"""

import json
import sqlite3
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from sqlalchemy import Connection, Select, bindparam, case, delete, insert, select, tuple_, update

from ringmaster.clock import SteadyClock, clock_of_record
from ringmaster.codec import SINCE_LATER, from_json, stored_as, stored_features, stored_flat, to_json
from ringmaster.errors import DatabaseFileError
from ringmaster.features import listed
from ringmaster.model_lineage.sqlite_files import fault_of, read_only
from ringmaster.tasks.storage.database import Database, JoinableWrite, file_url, insert_all_once
from ringmaster.tasks.storage.fact_keys import CLOCK
from ringmaster.tasks.storage.schema import FACTS, JOBS, PLANS, SEGMENTS
from ringmaster.techniques import Job
from ringmaster.techniques.job import TrainingPhase
from ringmaster.techniques.processes.gang_events import JobResult


@dataclass(frozen=True, kw_only=True)
class GroupDecision:
    """The decision which jobs train together.

    words: in words. groups: the members by their lead job.
    together_s, alone_s: the makespans of the plan with these groups and of the one with each job alone.
    lower_bound_s: of the makespan over all divisions into groups.
    practice_s: the makespan of one job after another on all devices.
    """

    words: str
    groups: Mapping[str, tuple[str, ...]]
    together_s: float
    alone_s: float
    lower_bound_s: float | None
    practice_s: float


class JobStatus(StrEnum):
    """The states of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"  # early, by a steering request: no failure


ENDED = (JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.STOPPED)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The last evaluation of a job that has a goal."""

    step: int
    metrics: Mapping[str, Any]
    num_rows: int | None = stored_as("num_evaluated_rows", default=None)


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What a job that was added while its batch ran is a variant of.

    step: the step of the other job's checkpoint from which it continues; None for one that begins at its first step.
    """

    job: str
    step: int | None


class RecordFeature:
    """What a feature keeps in the records of jobs: a frozen dataclass, whose fields have defaults.

    The module `execute` of the feature lists the class in `RECORD_FEATURES`. The fields are stored among those of the
    record.
    """

    key: ClassVar[str] = ""


FeatureT = TypeVar("FeatureT", bound=RecordFeature)
T = TypeVar("T")


def _feature_with(key: str) -> type[RecordFeature] | None:
    """Returns the feature of records that has a field of a name."""
    kinds = (kind for kind in listed("execute", "RECORD_FEATURES") if key in {each.name for each in fields(kind)})
    kind: type[RecordFeature] | None = next(kinds, None)
    return kind


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """The state of a job, and what is known of it beyond its definition.

    step: so many steps are done and checkpointed.

    The result of its last evaluation and of its end:
    compared: the metrics of the model and of the models that it was made of, on the same rows.
    ended_early: of a job that may end before its last step, whether it has reached what it trains for.
    model_uri: the model in the ledger, once it is recorded.
    energy_j: the energy that each of its segments has used.

    Its group, the jobs that one gang trains together:
    lead_job: the lead job whose gang trained it, if one did.
    parted: of a lead job, whether its group has parted. left_group: of a member, whether it has left its group.
    joined: the other jobs of the group that a job leads, by their names within the batch, where they are not those of
        the plan; none where it leads none any more.
    leads_after: of a job of an earlier release, the job whose group it has led since.

    What it may train:
    layout: the option under which it first ran, where it must run under no other.
    goal: the step up to which it may train; None for one without a limit. rested: the goal that it has reached.
    settled: the JSON form of the job that its placeholder became, or that a person has made of it.
    like: the job of the same shape whose data and profiles it uses.
    phases: of a job that has got another batch size or precision. choice: why it has, or has not.

    others: what other releases, or features that are not installed here, have stored.
    """

    OMITS_DEFAULTS: ClassVar[bool] = True

    name: str
    status: JobStatus = JobStatus.WAITING
    step: int = 0
    message: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    num_rows: int | None = stored_as("num_evaluated_rows", default=None)
    compared: tuple[Mapping[str, Any], ...] = ()
    ended_early: bool | None = stored_as("reached_target", default=None)
    model_dir: str | None = None
    model_uri: str | None = None
    energy_j: Mapping[str, float] = field(default_factory=dict)
    lead_job: str | None = stored_as("leader", default=None)
    parted: bool = False
    left_group: bool = False
    joined: tuple[str, ...] | None = None
    leads_after: str | None = None
    layout: Mapping[str, Any] | None = None
    goal: int | None = None
    rested: int | None = None
    evaluated: Evaluation | None = None
    settled: Mapping[str, Any] | None = stored_as("job", default=None)
    like: str | None = None
    variation: Variation | None = stored_as("cloned", default=None)  # noqa: RUF009 - it makes a field
    phases: tuple[TrainingPhase, ...] = ()
    choice: str | None = None
    features: tuple[RecordFeature, ...] = stored_features(_feature_with)
    others: Mapping[str, Any] = stored_flat({})

    def feature(self, kind: type[FeatureT]) -> FeatureT | None:
        """Returns what a feature keeps of the job; None where there is nothing."""
        return next((each for each in self.features if isinstance(each, kind)), None)

    @property
    def model_folder(self) -> Path:
        """The folder with the model of a job that is done."""
        assert self.model_dir is not None, f"{self.name} has made no model"
        return Path(self.model_dir)

    def of(self, job: Job) -> Job:
        """Returns a job as its record has changed it: with the phases that it has got, unless it has its own."""
        if job.phases or not self.phases:
            return job
        return replace(job, num_steps=self.phases[-1].num_steps).with_key("phases", to_json(self.phases))

    @property
    def settled_job(self) -> Job | None:
        """The job that its placeholder became."""
        return None if self.settled is None else from_json(Job, self.settled)

    @property
    def changed_steps(self) -> int | None:
        """The steps of a job that was redefined or has got phases; None for one that trains as it was written."""
        settled: int | None = (self.settled or {}).get("num_steps")
        return self.phases[-1].num_steps if self.phases else settled


@dataclass(frozen=True, kw_only=True)
class SegmentSpec:
    """What a segment was started as, which suffices to take it over.

    technique, config, num_devices, device_type, num_nodes: its option.
    devices: the names of the leases of its devices.
    first_step, last_step: the steps of its job; it is trained from the first up to the last one.
    planned_s: when the plan begins and ends it.
    predicted_bytes: the peak memory of a device that was predicted; None where it cannot be compared.
    members: the other jobs of the gang, by their names in the batch, with the step from which each is trained.
    others: what other releases have stored.
    """

    technique: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    num_devices: int = 1
    device_type: str = ""
    num_nodes: int = 1
    devices: tuple[str, ...] = ()
    first_step: int = 0
    last_step: int = 0
    planned_s: tuple[float, float] = (0.0, 0.0)
    predicted_bytes: int | None = None
    members: Mapping[str, int] = field(default_factory=dict, metadata={"key": "fellows", **SINCE_LATER})
    others: Mapping[str, Any] = stored_flat({})


@dataclass(frozen=True, kw_only=True)
class SegmentRecord:
    """A segment that was started.

    num_jobs: the number of jobs that its gang trained, which share the cost of its devices.
    outcome: what its gang reported of its job at its end; None while it runs.
    """

    id: int
    job: str
    spec: SegmentSpec
    num_jobs: int = 1
    started_s: float
    ended_s: float | None = None
    outcome: JobResult | None = None

    @property
    def seconds(self) -> float:
        """How long it has run; 0 while it runs."""
        return 0.0 if self.ended_s is None else max(0.0, self.ended_s - self.started_s)

    @property
    def result(self) -> JobResult:
        """Its outcome; empty while it runs."""
        return self.outcome or JobResult()

    @property
    def members(self) -> dict[str, int]:
        """The other jobs that its gang trained, named like its own job, with the step from which."""
        batch, slash, _ = self.job.rpartition("/")
        return {f"{batch}{slash}{name}": step for name, step in self.spec.members.items()}


class Journal:
    """The record of one batch or, if `batch` is None, of all batches of a pool, with jobs named "BATCH/JOB".

    clock: seconds since the epoch; by default the clock that is recorded in the database. However it is corrected, a
        segment that starts and ends in one process has its duration.

    Safe to use from several threads.
    """

    def __init__(self, database: Database, *, batch: str | None, clock: Callable[[], float] | None = None) -> None:
        self.database, self._batch = database, batch
        self.clock = clock or (lambda: database.read(recorded_clock)())
        self._clocks: dict[int, SteadyClock] = {}  # of the segments that run

    @classmethod
    def of_file(cls, file: Path, **options: Any) -> Self:
        """Returns the journal of a batch that runs on this machine alone. options: those of `Database`."""
        return cls(Database(file_url(file), **options), batch="")

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def put(self, key: str, value: Any) -> None:
        """Stores a fact of the whole batch (a JSON value)."""
        self.put_all({key: value})

    def put_all(self, facts: Mapping[str, Any]) -> None:
        """Stores several facts, all of them or none."""
        self.database.write(self._write_of(facts))

    def change_facts(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]], *keys: str) -> Mapping[str, Any]:
        """Replaces facts in one transaction, so that no other process changes them meanwhile; returns the new ones.

        change: returns the new facts by those of the keys that there are. It may be called again by its own result.
        """
        batch = self._batch or ""
        query = select(FACTS.c.key, FACTS.c.value).where(FACTS.c.batch == batch, FACTS.c.key.in_(keys))

        def act(connection: Connection) -> Mapping[str, Any]:
            known = {key: value[0] for key, value in connection.execute(query) if isinstance(value, list) and value}
            facts = change(known)
            put_facts(connection, facts, batch=batch)
            return facts

        return self.database.write(act)

    def put_later(self, facts: Mapping[str, Any]) -> None:
        """Stores several facts as `put_all` does, with the next writes of a database that batches."""
        self.database.write_later(self._write_of(facts))

    def _write_of(self, facts: Mapping[str, Any]) -> Callable[[Connection], None]:
        return lambda connection: put_facts(connection, facts, batch=self._batch or "")

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a fact of the whole batch."""
        result = self.database.scalar(
            select(FACTS.c.value).where(FACTS.c.batch == (self._batch or ""), FACTS.c.key == key)
        )
        return result[0] if isinstance(result, list) and result else default  # a damaged one counts as missing

    def read(self, key: str, kind: type[T]) -> T | None:
        """Returns a fact of the whole batch that is the JSON form of a value; None where there is none."""
        stored = self.get(key)
        return None if stored is None else from_json(kind, stored)

    def remove(self, key: str) -> None:
        """Deletes a fact of the whole batch."""
        self.database.execute(delete(FACTS).where(FACTS.c.batch == (self._batch or ""), FACTS.c.key == key))

    def drop_facts(self) -> None:
        """Deletes the facts of the whole batch."""
        self.database.execute(delete(FACTS).where(FACTS.c.batch == (self._batch or "")))

    def jobs(self, *, batches: Collection[str] | None = None) -> dict[str, JobRecord]:
        """Returns all jobs by name, in the order in which they were first written.

        batches: for a pool, restricts the result to these batches.
        """
        query = self._own_rows(select(JOBS), JOBS.c.batch).order_by(JOBS.c.number)
        if batches is not None:
            query = query.where(JOBS.c.batch.in_(sorted(batches)))
        records = (job_record(self._name(row.batch, row.name), row._mapping) for row in self.database.rows(query))
        return {record.name: record for record in records}

    def job(self, name: str) -> JobRecord | None:
        """Returns one job; None if it was never written."""
        batch, own_name = self._parts(name)
        rows = self.database.rows(select(JOBS).where(JOBS.c.batch == batch, JOBS.c.name == own_name))
        return next((job_record(name, row._mapping) for row in rows), None)

    def write_job(self, name: str, **changes: Any) -> JobRecord:
        """Changes a job's record, and returns it. changes: fields of `JobRecord`; features replace their kind."""
        return self.database.write(lambda connection: self.change(connection, {name: changes}))[name]

    def change_jobs(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Changes the records of several jobs, given by name, as `write_job` does."""
        self.database.write_later(JobChanges(self, changes))

    def change(self, connection: Connection, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, JobRecord]:
        """Changes records as part of a transaction; returns them."""
        names = {name: self._parts(name) for name in changes}
        here = tuple_(JOBS.c.batch, JOBS.c.name).in_(list(names.values()))
        rows = {(row.batch, row.name): row._mapping for row in connection.execute(select(JOBS).where(here)).all()}
        records, fresh, known = {}, [], []
        for name, (batch, job) in names.items():
            row = rows.get((batch, job))
            record = JobRecord(name=name) if row is None else job_record(name, row)
            record = records[name] = changed(record, changes[name])
            values = {"status": record.status, "step": record.step, "message": record.message}
            values["details"] = details_of(record)
            if row is None:
                fresh.append({"batch": batch, "name": job, **values})
            else:
                known.append({"of": row["number"], **values})
        if fresh:
            connection.execute(insert(JOBS), fresh)
        if known:
            connection.execute(update(JOBS).where(JOBS.c.number == bindparam("of")), known)
        return records

    def start_segments(self, started: Sequence[tuple[str, SegmentSpec]]) -> list[int]:
        """Records that segments, each with its job, are about to start. Returns their numbers."""
        rows, steady = [], SteadyClock(wall_clock=self.clock)
        now_s = steady()
        for name, spec in started:
            batch, job = self._parts(name)
            key = uuid.uuid4().hex
            rows.append({"key": key, "batch": batch, "job": job, "what": to_json(spec), "started_s": now_s})
        numbers = self.database.write(lambda connection: insert_all_once(connection, SEGMENTS, rows))
        self._clocks |= dict.fromkeys(numbers, steady)
        return numbers

    def end_segment(self, number: int, outcome: JobResult) -> None:
        """Records how a segment ended."""
        now_s = self._clocks.pop(number, self.clock)()
        # Another process may have started it, before the clock was set back.
        ended_s = case((SEGMENTS.c.started_s > now_s, SEGMENTS.c.started_s), else_=now_s)
        values = {"ended_s": ended_s, "outcome": to_json(outcome)}
        self.database.execute_later(update(SEGMENTS).where(SEGMENTS.c.id == number).values(**values))

    def segments(self, job: str | None = None) -> list[SegmentRecord]:
        """Returns the started segments of one job or of all, in order.

        The segments of one job include those in which the gang of another job trained it, in the form of its own.
        """
        query = self._own_rows(select(SEGMENTS), SEGMENTS.c.batch).order_by(SEGMENTS.c.id)
        if job is None:
            return [
                segment_record(row._mapping, job=self._name(row.batch, row.job)) for row in self.database.rows(query)
            ]
        batch, name = self._parts(job)
        of_job = select(JOBS.c.details).where(JOBS.c.batch == batch, JOBS.c.name == name)
        query = query.where(SEGMENTS.c.batch == batch)

        def read(connection: Connection) -> list[Any]:
            lead = (connection.execute(of_job).scalar() or {}).get("leader", name)
            return list(connection.execute(query.where(SEGMENTS.c.job.in_({name, lead}))).all())

        records = [segment_record(row._mapping, job=row.job) for row in self.database.read(read)]
        own = [r if r.job == name else _as_member(r, name) for r in records if name in (r.job, *r.members)]
        return [replace(record, job=job) for record in own]

    def write_plan(self, content: Mapping[str, Any], *, why: str) -> None:
        """Stores a plan."""
        values = {"batch": self._batch or "", "made_s": self.clock(), "why": why, "content": _plain(content)}
        self.database.insert_later(PLANS, **values)

    def plans(self, *, since_s: float = 0.0) -> list[dict[str, Any]]:
        """Returns the plans that were made since `since_s`, oldest first."""
        query = select(PLANS.c.content).where(PLANS.c.batch == (self._batch or ""), PLANS.c.made_s >= since_s)
        return list(self.database.scalars(query.order_by(PLANS.c.id)))

    def _own_rows(self, query: Select[Any], column: Any) -> Select[Any]:
        return query if self._batch is None else query.where(column == self._batch)

    def _parts(self, name: str) -> tuple[str, str]:
        if self._batch is not None:
            return self._batch, name
        batch, _, job = name.partition("/")
        assert job, f"{name} does not say which batch it is of"
        return batch, job

    def _name(self, batch: str, job: str) -> str:
        return job if self._batch is not None else f"{batch}/{job}"


def put_facts(connection: Connection, facts: Mapping[str, Any], *, batch: str) -> None:
    """Stores facts (JSON values) of a batch, as part of a transaction. batch: empty for those of a whole pool."""
    for key, value in facts.items():
        connection.execute(delete(FACTS).where(FACTS.c.batch == batch, FACTS.c.key == key))
        connection.execute(insert(FACTS).values(batch=batch, key=key, value=[_plain(value)]))


def clock_record(connection: Connection) -> dict[str, Any] | None:
    """Returns the record of the clock in a database of one batch or of a pool; None if there is none."""
    value = connection.execute(select(FACTS.c.value).where(FACTS.c.batch == "", FACTS.c.key == CLOCK)).scalar()
    return value[0] if isinstance(value, list) and value else None


def recorded_clock(connection: Connection) -> Callable[[], float]:
    """Returns the clock that is recorded in a database of one batch or of a pool; the wall clock where none is."""
    return clock_of_record(clock_record(connection))


def jobs_of_file(file: Path) -> list[JobRecord]:
    """Returns the jobs in the journal of a batch that runs on this machine alone, as `Journal.jobs` does.

    Raises DatabaseFileError, and OSError where it cannot be read.
    """
    return [job_record(row["name"], row) for row in _rows_of_file(file, "jobs", order="number", content="details")]


def segments_of_file(file: Path) -> list[SegmentRecord]:
    """Returns the segments in the journal of a batch that runs on this machine alone, without their outcomes.

    Raises DatabaseFileError, and OSError where it cannot be read.
    """
    rows = _rows_of_file(file, "segments", order="id", content="what")
    return [segment_record({**row, "outcome": None}, job=row["job"]) for row in rows]


def facts_of_file(file: Path, *keys: str) -> dict[str, Any]:
    """Returns facts in the journal of a batch that runs on this machine alone, as far as there are any.

    Raises DatabaseFileError, and OSError where it cannot be read.
    """
    rows = _rows_of_file(file, "facts", order="key", content="value", keys=keys)
    return {row["key"]: row["value"][0] for row in rows if isinstance(row["value"], list) and row["value"]}


def _rows_of_file(
    file: Path, table: str, *, order: str, content: str, keys: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Returns the rows of a table of a journal. content: the column with JSON. keys: restricts them to those of facts.

    It only reads, so that a thousand journals take a second: a `Database` prepares its tables, which is a synced write.
    """
    try:
        with closing(read_only(file)) as connection:
            connection.row_factory = sqlite3.Row
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                return []  # its run was killed before it had written anything
            only = f"AND key IN ({', '.join('?' * len(keys))})" if keys else ""
            query = f"SELECT * FROM {table} WHERE batch = '' {only} ORDER BY {order}"  # noqa: S608 - our own names
            rows = connection.execute(query, tuple(keys)).fetchall()
        return [{**dict(row), content: json.loads(row[content])} for row in rows]
    except (sqlite3.Error, ValueError) as error:
        fault = fault_of(file, contents="its records of runs", writes=False)
        raise DatabaseFileError([fault or f"{file}: {error}. To fix: restore the file"]) from error


class JobChanges(JoinableWrite):
    """A write of changes to jobs' records, by name."""

    def __init__(self, journal: Journal, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._journal, self._changes = journal, dict(changes)

    def join(self, later: object) -> bool:
        """Adds later changes through the same journal."""
        if not isinstance(later, JobChanges) or later._journal is not self._journal:
            return False
        for name, its in later._changes.items():
            own = self._changes.get(name, {})
            self._changes[name] = {**own, **its, "features": (*own.get("features", ()), *its.get("features", ()))}
        return True

    def __call__(self, connection: Connection) -> None:
        """Changes the records."""
        self._journal.change(connection, self._changes)


def changed(record: JobRecord, changes: Mapping[str, Any]) -> JobRecord:
    """Returns a record with changed fields. Features replace those of their kind."""
    features = {type(each): each for each in (*record.features, *changes.get("features", ()))}
    return replace(record, **{**changes, "features": tuple(features.values())})


def details_of(record: JobRecord) -> dict[str, Any]:
    """Returns the JSON form of what a record has beyond the columns of its row, which `job_record` reads."""
    return {key: value for key, value in to_json(record).items() if key not in ("name", "status", "step", "message")}


def _plain(value: Any) -> Any:
    """Returns the value as the database returns it: mappings become dicts, tuples become lists."""
    return json.loads(json.dumps(value, default=dict))


def segment_record(row: Mapping[Any, Any], *, job: str) -> SegmentRecord:
    """Returns a row of the segments table as a record, under the reader's name of the job."""
    spec = from_json(SegmentSpec, row["what"])
    outcome = None if row["outcome"] is None else from_json(JobResult, row["outcome"])
    own = {key: row[key] for key in ("id", "started_s", "ended_s")}
    return SegmentRecord(job=job, spec=spec, num_jobs=1 + len(spec.members), outcome=outcome, **own)


def _as_member(record: SegmentRecord, job: str) -> SegmentRecord:
    """Returns another job's segment as a segment of `job`, which its gang trained too."""
    spec = replace(record.spec, first_step=record.members[job], members={})
    outcome = record.outcome
    if outcome is not None:
        outcome = (outcome.members or {}).get(job) or JobResult(status=outcome.status, message=outcome.message)
    return replace(record, spec=spec, outcome=outcome)


def job_record(name: str, row: Mapping[Any, Any]) -> JobRecord:
    """Returns the record in a row of the table of jobs."""
    own = {"name": name, **{key: row[key] for key in ("status", "step", "message")}}
    try:
        return from_json(JobRecord, {**(row["details"] if isinstance(row["details"], dict) else {}), **own})
    except ValueError as error:  # by hand, or of another release: a fault of this job alone
        message = f"its record cannot be read: {error}. {row['message']}"
        return JobRecord(name=name, status=JobStatus.FAILED, step=row["step"], message=message)


def begin_jobs(journal: Journal, jobs: Sequence[Job], *, faults: Mapping[str, str]) -> list[Job]:
    """Writes the jobs into the journal and returns those that are left to train. Existing records are kept.

    A job that had failed is tried again, as the fault may have been corrected before the batch was resumed.

    faults: by job name, why a job cannot be trained at all.
    """
    known = journal.jobs()
    for job in jobs:
        if job.name not in known:
            journal.write_job(job.name)
        elif known[job.name].status not in (JobStatus.DONE, JobStatus.STOPPED):
            journal.write_job(job.name, status=JobStatus.WAITING, message="")
    for name, message in faults.items():
        if journal.jobs()[name].status not in (JobStatus.DONE, JobStatus.STOPPED):
            journal.write_job(name, status=JobStatus.FAILED, message=message)
    records: Mapping[str, Any] = journal.jobs()
    return [job for job in jobs if records[job.name].status == JobStatus.WAITING]
