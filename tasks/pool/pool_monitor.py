"""Samples a pool periodically: its state, the use of its devices, and the age of its heartbeats.

It counts what happens from the rows that are added to the pool's database.
"""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, func, or_, select
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.control.requests import RequestKind, RequestStatus
from ringmaster.tasks.execution.execution_events import JobEnded, predictions_in
from ringmaster.tasks.planning import Plan
from ringmaster.tasks.pool.nodes import NodeRecord, NodeStatus, SilenceClock, is_loan, read_nodes
from ringmaster.tasks.pool.submissions import BatchStatus
from ringmaster.tasks.storage import schema
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import NEWEST_PREDICTION
from ringmaster.tasks.storage.journal import recorded_clock

logger = logging.getLogger(__name__)

LEADER = ("leader", "")


class DeviceStatus(StrEnum):
    """The state of a device; the first that applies.

    unhealthy: it must not be used. leased: to a segment. lent: to trials that measure jobs. leaving: its node takes no
    new work. idle: anything may start there.
    """

    UNHEALTHY = "unhealthy"
    LEASED = "leased"
    LENT = "lent"
    LEAVING = "leaving"
    IDLE = "idle"


class BatchStage(StrEnum):
    """The stage of a batch that has not ended.

    queued: handed over; it has no flow run yet. measuring: its jobs are not in the plan yet. active: they are.
    """

    QUEUED = "queued"
    MEASURING = "measuring"
    ACTIVE = "active"


@dataclass(frozen=True, kw_only=True)
class NodeReading:
    """A node that is registered.

    heartbeat: changes with each heartbeat of its worker.
    devices: the number of its devices in each state.
    """

    name: str
    status: str
    heartbeat: tuple[str, int]
    devices: Mapping[DeviceStatus, int]


@dataclass(frozen=True, kw_only=True)
class LeaderState:
    """The executor that leads.

    is_there: False after it has resigned.
    epoch: how often a controller has taken the lead.
    heartbeat: changes with each heartbeat.
    """

    is_there: bool
    epoch: int
    heartbeat: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """The plan that was made last.

    made_s: seconds since the epoch.
    makespan_s: seconds from then to its planned end.
    gap: as in `Plan`; None without a bound.
    """

    id: int
    made_s: float
    makespan_s: float
    gap: float | None


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """The state of a pool.

    leader: None before a controller has led for the first time.
    batches: the number of batches in each stage.
    jobs: the number of jobs by name of their batch and status, for active batches alone.
    ends: the predicted ends of jobs by batch, job and which end ("earliest", "median", "latest"), since the epoch.
    """

    nodes: tuple[NodeReading, ...]
    leader: LeaderState | None
    batches: Mapping[BatchStage, int]
    jobs: Mapping[tuple[str, str], int]
    plan: PlanState | None
    ends: Mapping[tuple[str, str, str], float] = field(default_factory=dict)


class PoolStateReader:
    """Reads the state again and again; long rows, which do not change, are read once."""

    def __init__(self) -> None:
        self._batches: dict[str, tuple[str, str]] = {}  # by id of an active batch, its name and its flow run
        self._plan: PlanState | None = None

    def read(self, connection: Connection) -> PoolState:
        """Returns the state, within a transaction that may be tried again."""
        self._batches = self._active(connection)
        self._plan = self._newest_plan(connection)
        return PoolState(
            nodes=_nodes(connection),
            leader=_leader(connection),
            batches=self._stages(connection),
            jobs=self._jobs(connection),
            plan=self._plan,
            ends=self._ends(connection),
        )

    def _active(self, connection: Connection) -> dict[str, tuple[str, str]]:
        ids = (
            connection.execute(select(schema.BATCHES.c.id).where(schema.BATCHES.c.status == BatchStatus.SUBMITTED))
            .scalars()
            .all()
        )
        unknown = [id for id in ids if id not in self._batches]
        name, flow_run = (schema.BATCHES.c.content[key].as_string() for key in ("name", "flow_run"))
        rows = connection.execute(
            select(schema.BATCHES.c.id, name, flow_run).where(schema.BATCHES.c.id.in_(unknown))
        ).all()
        result = {**self._batches, **{id: (name, flow_run or "") for id, name, flow_run in rows}}
        return {id: result[id] for id in ids}

    def _stages(self, connection: Connection) -> dict[BatchStage, int]:
        query = select(schema.REQUESTS.c.status, schema.REQUESTS.c.answer)
        requested = query.where(
            schema.REQUESTS.c.kind == RequestKind.TRAIN,
            schema.REQUESTS.c.status.in_((RequestStatus.OPEN, RequestStatus.GRANTED)),
        )
        rows = connection.execute(requested).all()
        flow_runs = {flow_run for _, flow_run in self._batches.values()}
        granted = [answer.get("flow_run") for status, answer in rows if status == RequestStatus.GRANTED]
        return {
            BatchStage.QUEUED: len(rows) - len(granted),
            BatchStage.MEASURING: sum(flow_run not in flow_runs for flow_run in granted),
            BatchStage.ACTIVE: len(self._batches),
        }

    def _jobs(self, connection: Connection) -> dict[tuple[str, str], int]:
        query = select(schema.JOBS.c.batch, schema.JOBS.c.status, func.count()).where(
            schema.JOBS.c.batch.in_(list(self._batches))
        )
        result = Counter[tuple[str, str]]()
        for batch, status, number in connection.execute(query.group_by(schema.JOBS.c.batch, schema.JOBS.c.status)):
            result[self._batches[batch][0], status] += number  # batches of one name count together
        return dict(result)

    def _ends(self, connection: Connection) -> dict[tuple[str, str, str], float]:
        ahead_s = recorded_clock(connection)() - time.time()
        query = select(schema.FACTS.c.batch, schema.FACTS.c.value).where(schema.FACTS.c.key == NEWEST_PREDICTION)
        result: dict[tuple[str, str, str], float] = {}
        for batch, value in connection.execute(query.where(schema.FACTS.c.batch.in_(list(self._batches)))):
            _, prediction = predictions_in({NEWEST_PREDICTION: value[0]})
            if prediction is None:
                continue
            for job, end in prediction.jobs.items():
                since_s = prediction.since_s - ahead_s
                earliest_s, latest_s = end.later(since_s).bounds_s
                ends_s = {"earliest": earliest_s, "median": since_s + end.end_s, "latest": latest_s}
                result |= {(self._batches[batch][0], job, which): at_s for which, at_s in ends_s.items()}
        return result

    def _newest_plan(self, connection: Connection) -> PlanState | None:
        newest = connection.execute(select(func.max(schema.PLANS.c.id)).where(schema.PLANS.c.batch == "")).scalar()
        if newest is None or (self._plan is not None and self._plan.id == newest):
            return self._plan if newest is not None else None
        row = connection.execute(
            select(schema.PLANS.c.made_s, schema.PLANS.c.content).where(schema.PLANS.c.id == newest)
        ).one()
        plan = Plan.from_json(row.content["plan"])
        return PlanState(id=int(newest), made_s=row.made_s, makespan_s=plan.makespan_s, gap=plan.gap)


def _leader(connection: Connection) -> LeaderState | None:
    row = connection.execute(
        select(schema.EXECUTOR.c.owner, schema.EXECUTOR.c.epoch, schema.EXECUTOR.c.beats)
    ).one_or_none()
    if row is None:
        return None
    return LeaderState(is_there=bool(row.owner), epoch=int(row.epoch), heartbeat=(int(row.epoch), int(row.beats)))


def _nodes(connection: Connection) -> tuple[NodeReading, ...]:
    rows = connection.execute(select(schema.LEASES.c.device, schema.LEASES.c.holder)).all()
    held = {row.device: row.holder for row in rows}
    return tuple(_node(record, held) for record in read_nodes(connection))


def _node(record: NodeRecord, held: Mapping[str, str]) -> NodeReading:
    names = Cluster(nodes=(Node(name=record.name, devices=record.devices),)).lease_names()
    states = Counter(_device(record, number, held.get(name)) for (_, number), name in names.items())
    return NodeReading(
        name=record.name,
        status=record.status,
        heartbeat=(record.incarnation, record.beats),
        devices={state: states[state] for state in DeviceStatus},
    )


def _device(record: NodeRecord, number: int, holder: str | None) -> DeviceStatus:
    if str(number) in record.health:
        return DeviceStatus.UNHEALTHY
    if holder is not None:
        return DeviceStatus.LENT if is_loan(holder) else DeviceStatus.LEASED
    return DeviceStatus.LEAVING if record.status == NodeStatus.LEAVING else DeviceStatus.IDLE


# The first that matches counts, as a plan may have several reasons at once. Job and node names come before or after
# these words, and may contain them.
PLAN_REASONS: Mapping[str, str] = {
    "start": r"(start|resumed|an executor began)$",
    "new_jobs": r"batch .+ has \d+ jobs$",
    "devices": r"node .+ (is gone|came)\b|the health of devices has changed|.* (has lost|holds|has left) its devices",
    "failure": r".* ran out of memory|the gang of .* crashed|jobs have failed$",
    "deadline": r"in danger of missing their deadlines",
    "clock": r"the (clock|speeds measured since the last plan)$",
    "forecast": r".* is (late|early) by \d+ s",
    "request": r"jobs were (cancelled|paused|resumed|retried)|the priorities of batch|a person has set",
    "group": r".* (continues? alone|leads its group)|\d+ jobs are grouped anew$",
    "verification": (
        r"steps \d+ to \d+ (of .*)?(are|were) verified|the work of .* is repeated|"
        r"node .+ (must not be used, where|did not end its segment of|was expelled while|and node .* have other bits)"
    ),
    "steering": (
        r".* (may train on|stopped early|evaluated (again|on more rows))$|.* stays on .*, under which it started|"
        r".* (keeps|trains on) batches of \d+ |"
        r".* (keeps|takes, in place of \S+,) the learning rate "
    ),
    "other": "",
}
"""The kinds of reasons why plans are made, and what begins a reason of each."""


def reason_of(why: str) -> str:
    """Returns the kind of the reason of a plan. why: the text that was stored with the plan."""
    parts = why.split("; ")
    return next(kind for kind, pattern in PLAN_REASONS.items() if any(re.match(pattern, part) for part in parts))


@dataclass(frozen=True, kw_only=True)
class PoolCounts:
    """What has happened since `begin`.

    plans: the number of plans by reason.
    segments: the number of segments that have ended, by the status of their outcomes.
    jobs: the number of jobs that have ended, by status. A job that is resumed after that may end again.
    last_plan, last_segment, last_event: the newest rows that are counted, or were there before.
    running: the segments that have not ended.
    """

    plans: Mapping[str, int] = field(default_factory=dict)
    segments: Mapping[str, int] = field(default_factory=dict)
    jobs: Mapping[str, int] = field(default_factory=dict)
    last_plan: int = 0
    last_segment: int = 0
    last_event: int = 0
    running: frozenset[int] = frozenset()


def begin(connection: Connection) -> PoolCounts:
    """Returns counts of zero, to which `count` adds what happens from now on."""
    last_plan, last_segment, last_event = (
        int(connection.execute(select(func.max(table.c.id))).scalar() or 0)
        for table in (schema.PLANS, schema.SEGMENTS, schema.EVENT_LOG)
    )
    running = (
        connection.execute(select(schema.SEGMENTS.c.id).where(schema.SEGMENTS.c.ended_s.is_(None))).scalars().all()
    )
    return PoolCounts(last_plan=last_plan, last_segment=last_segment, last_event=last_event, running=frozenset(running))


def count(connection: Connection, before: PoolCounts) -> PoolCounts:
    """Returns `before` with what has happened since."""
    plans = connection.execute(
        select(schema.PLANS.c.id, schema.PLANS.c.why).where(
            schema.PLANS.c.batch == "", schema.PLANS.c.id > before.last_plan
        )
    ).all()
    status = schema.json_field(schema.SEGMENTS.c.outcome, "status").label("status")
    news = or_(schema.SEGMENTS.c.id > before.last_segment, schema.SEGMENTS.c.id.in_(before.running))
    segments = connection.execute(select(schema.SEGMENTS.c.id, schema.SEGMENTS.c.ended_s, status).where(news)).all()
    last_event = max(before.last_event, connection.execute(select(func.max(schema.EVENT_LOG.c.id))).scalar() or 0)
    ends = select(schema.json_field(schema.EVENT_LOG.c.content, "status")).where(
        schema.EVENT_LOG.c.kind == JobEnded.__name__
    )
    ends = ends.where(schema.EVENT_LOG.c.id > before.last_event, schema.EVENT_LOG.c.id <= last_event)
    return PoolCounts(
        plans=Counter(before.plans) + Counter(reason_of(row.why) for row in plans),
        segments=Counter(before.segments) + Counter(row.status for row in segments if row.ended_s is not None),
        jobs=Counter(before.jobs) + Counter(connection.execute(ends).scalars().all()),
        last_plan=max([before.last_plan, *(row.id for row in plans)]),
        last_segment=max([before.last_segment, *(row.id for row in segments)]),
        last_event=last_event,
        running=frozenset(row.id for row in segments if row.ended_s is None),
    )


@dataclass(frozen=True, kw_only=True)
class PoolMeasurement:
    """What is known of a pool at one moment.

    state: None while the database does not answer, and before it has answered for the first time.
    device_seconds: by node and state, how long its devices were in that state while both ends of a sample were seen.
    node_heartbeat_age_s: by node, the time since its heartbeat has changed, by the clock of this process.
    leader_heartbeat_age_s: the same of the executor that leads; None if none does.
    """

    state: PoolState | None
    counts: PoolCounts
    device_seconds: Mapping[tuple[str, DeviceStatus], float]
    node_heartbeat_age_s: Mapping[str, float]
    leader_heartbeat_age_s: float | None


class PoolMonitor:
    """Measures a pool. `sample` is called periodically, by one thread; other threads may call `measurement`.

    open_database: opens the pool's database, without waiting where it does not answer.
    clock: monotonic seconds.
    """

    def __init__(self, open_database: Callable[[], Database], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._open, self._clock = open_database, clock
        self._database: Database | None = None
        self._reader = PoolStateReader()
        self._lock = threading.Lock()
        self._state: PoolState | None = None
        self._sampled_s = 0.0
        self._counts: PoolCounts | None = None
        self._is_away = False
        self._device_seconds: dict[tuple[str, DeviceStatus], float] = {}
        self._silence_clock, self._silences_s = SilenceClock(clock), dict[tuple[str, str], float]()

    def sample(self) -> None:
        """Reads the database once. Without an answer of the database, the measurement has no state."""
        try:
            self._database = self._database or self._open()
            state, counted = self._database.read(self._read)
        except SQLAlchemyError as error:
            if not self._is_away:
                logger.warning("the pool's database does not answer: %s", getattr(error, "orig", error))
            self._is_away = True
            with self._lock:
                self._state = None
            return
        self._is_away = False
        with self._lock:
            self._take(state, counted)

    def measurement(self) -> PoolMeasurement:
        """Returns what the last sample has found. Ages are those of now."""
        with self._lock:
            state, since_s = self._state, self._clock() - self._sampled_s
            nodes = state.nodes if state is not None else ()
            is_led = state is not None and state.leader is not None and state.leader.is_there
            return PoolMeasurement(
                state=state,
                counts=self._counts or PoolCounts(),
                device_seconds=dict(self._device_seconds),
                node_heartbeat_age_s={each.name: since_s + self._silences_s["node", each.name] for each in nodes},
                leader_heartbeat_age_s=since_s + self._silences_s[LEADER] if is_led else None,
            )

    def close(self) -> None:
        """Closes the database."""
        if self._database is not None:
            self._database.close()

    def _read(self, connection: Connection) -> tuple[PoolState, PoolCounts]:
        before = self._counts if self._counts is not None else begin(connection)
        return self._reader.read(connection), count(connection, before)

    def _take(self, state: PoolState, counted: PoolCounts) -> None:
        now_s, before = self._clock(), self._state
        names = {node.name for node in state.nodes}
        # Nodes come and go: series of those that are gone would pile up.
        self._device_seconds = {key: value for key, value in self._device_seconds.items() if key[0] in names}
        for node in state.nodes:
            for each in DeviceStatus:
                self._device_seconds.setdefault((node.name, each), 0.0)
        for node in before.nodes if before is not None else ():
            for each, number in node.devices.items():
                if (node.name, each) in self._device_seconds:
                    self._device_seconds[node.name, each] += number * (now_s - self._sampled_s)
        signs: dict[tuple[str, str], Any] = {("node", node.name): node.heartbeat for node in state.nodes}
        signs |= {} if state.leader is None else {LEADER: state.leader.heartbeat}
        self._silences_s = self._silence_clock.silences_s(signs)
        self._state, self._counts, self._sampled_s = state, counted, now_s
