"""The present state of a pool, as its database has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, func, select

from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.planning import Plan
from ringmaster.tasks.pool.leases import is_loan
from ringmaster.tasks.pool.nodes import NodeRecord, NodeStatus, read_nodes
from ringmaster.tasks.pool.requests import RequestKind, RequestStatus
from ringmaster.tasks.pool.submissions import BatchStatus
from ringmaster.tasks.storage.schema import BATCHES, EXECUTOR, JOBS, LEASES, PLANS, REQUESTS


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
    """

    nodes: tuple[NodeReading, ...]
    leader: LeaderState | None
    batches: Mapping[BatchStage, int]
    jobs: Mapping[tuple[str, str], int]
    plan: PlanState | None


class StateReader:
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
        )

    def _active(self, connection: Connection) -> dict[str, tuple[str, str]]:
        ids = connection.execute(select(BATCHES.c.id).where(BATCHES.c.status == BatchStatus.SUBMITTED)).scalars().all()
        unknown = [id for id in ids if id not in self._batches]
        name, flow_run = (BATCHES.c.content[key].as_string() for key in ("name", "flow_run"))
        rows = connection.execute(select(BATCHES.c.id, name, flow_run).where(BATCHES.c.id.in_(unknown))).all()
        found = {**self._batches, **{id: (name, flow_run or "") for id, name, flow_run in rows}}
        return {id: found[id] for id in ids}

    def _stages(self, connection: Connection) -> dict[BatchStage, int]:
        query = select(REQUESTS.c.status, REQUESTS.c.answer)
        asked = query.where(
            REQUESTS.c.kind == RequestKind.TRAIN, REQUESTS.c.status.in_((RequestStatus.OPEN, RequestStatus.GRANTED))
        )
        rows = connection.execute(asked).all()
        flow_runs = {flow_run for _, flow_run in self._batches.values()}
        granted = [answer.get("flow_run") for status, answer in rows if status == RequestStatus.GRANTED]
        return {
            BatchStage.QUEUED: len(rows) - len(granted),
            BatchStage.MEASURING: sum(flow_run not in flow_runs for flow_run in granted),
            BatchStage.ACTIVE: len(self._batches),
        }

    def _jobs(self, connection: Connection) -> dict[tuple[str, str], int]:
        query = select(JOBS.c.batch, JOBS.c.status, func.count()).where(JOBS.c.batch.in_(list(self._batches)))
        found = Counter[tuple[str, str]]()
        for batch, status, number in connection.execute(query.group_by(JOBS.c.batch, JOBS.c.status)):
            found[self._batches[batch][0], status] += number  # batches of one name count together
        return dict(found)

    def _newest_plan(self, connection: Connection) -> PlanState | None:
        newest = connection.execute(select(func.max(PLANS.c.id)).where(PLANS.c.batch == "")).scalar()
        if newest is None or (self._plan is not None and self._plan.id == newest):
            return self._plan if newest is not None else None
        row = connection.execute(select(PLANS.c.made_s, PLANS.c.content).where(PLANS.c.id == newest)).one()
        plan = Plan.from_json(row.content["plan"])
        return PlanState(id=int(newest), made_s=row.made_s, makespan_s=plan.makespan_s, gap=plan.gap)


def _leader(connection: Connection) -> LeaderState | None:
    row = connection.execute(select(EXECUTOR.c.owner, EXECUTOR.c.epoch, EXECUTOR.c.beats)).one_or_none()
    if row is None:
        return None
    return LeaderState(is_there=bool(row.owner), epoch=int(row.epoch), heartbeat=(int(row.epoch), int(row.beats)))


def _nodes(connection: Connection) -> tuple[NodeReading, ...]:
    rows = connection.execute(select(LEASES.c.device, LEASES.c.holder)).all()
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
