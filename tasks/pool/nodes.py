"""The nodes of a pool: the registry to which their workers write, the leases of their devices, and their timeouts.

A lease outlives the process that took it. The executor that takes over finds it, and ends it if its holder is gone.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, delete, insert, select, update

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.planning.problems.problem_parts import MAX_DEVICES
from ringmaster.tasks.storage.database import Database, insert_missing
from ringmaster.tasks.storage.schema import ABOUT, LEASES, NODES, about, set_about

logger = logging.getLogger(__name__)

K = TypeVar("K")

LOAN = "loan {}"
"""The holder of the leases of a request for devices, by the request's number. All other leases are of segments."""

VARIABLE = "RINGMASTER_PATIENCE"
BLIND_S = 10.0
"""The time between two checks of nodes or requests after which, unless said otherwise, all silences are measured
again.
"""
KnownDevices = dict[str, tuple[Any, tuple[Device, ...], str]]
"""By name of a node, the stored form of its devices, the devices, and what was wrong with its row."""
MAX_BYTES = 2**60  # of a device
MAX_LENT = "most lent nodes"
EXPELLED, REFERENCE = "expelled {}", "bits of {}"
"""The keys of facts of a pool: why a node is expelled, and the `calibration` of a kind of devices."""
LEFT_KEPT_S = 3600.0  # how long the registry knows that a worker has ended in order


def is_loan(holder: str) -> bool:
    """Returns whether a lease belongs to a request for devices, and not to a segment."""
    return holder.startswith(LOAN.format(""))


class SilenceClock:
    """Measures for how long signs of life have not changed. No clocks are compared: it is the observer's own.

    Time in which the observer could not look is not silence: after it, all silences are measured again.

    clock: monotonic seconds.
    blind_s: the time between two looks beyond which no silence can be concluded.
    """

    def __init__(self, clock: Callable[[], float], *, blind_s: float = math.inf) -> None:
        self._clock, self._blind_s, self._looked_s = clock, blind_s, clock()
        self._seen: Mapping[Any, tuple[Any, float]] = {}  # by whose it is, a sign, and when it was first seen

    def silences_s(self, signs: Mapping[K, Any]) -> dict[K, float]:
        """Returns for how many seconds each sign has been the same, 0 for a new one. Others are forgotten."""
        now_s = self._clock()
        before = self._seen if now_s - self._looked_s <= self._blind_s else {}
        seen = {key: before.get(key, (sign, now_s)) for key, sign in signs.items()}
        self._seen = {key: seen[key] if seen[key][0] == sign else (sign, now_s) for key, sign in signs.items()}
        self._looked_s = now_s
        return {key: now_s - self._seen[key][1] for key in signs}


class PoolLeases:
    """The leases of a pool's devices, named "node:kind:number". Safe between threads and between processes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, devices: Sequence[str], *, holder: str) -> bool:
        """Leases all of `devices` to `holder`, or none of them if one is leased; returns whether they were leased.

        A device that the same holder has leased counts as leased too: one holder may act for many users that must not
        share the device.
        """
        return self.take_each([devices], holder=holder)[0]

    def take_each(self, gangs: Sequence[Sequence[str]], *, holder: str) -> list[bool]:
        """Leases the devices of each gang as `take` does, in one transaction; returns which were leased."""
        since_s = time.time()  # identifies this call among all of the holder's, in case its commit is retried

        def act(connection: Connection) -> list[bool]:
            query = select(LEASES).where(LEASES.c.device.in_([device for gang in gangs for device in gang]))
            result = connection.execute(query).all()
            busy = {row.device for row in result if (row.holder, row.since_s) != (holder, since_s)}
            are_taken, rows = [], []
            for gang in gangs:
                are_taken.append(busy.isdisjoint(gang))
                if are_taken[-1]:
                    busy.update(gang)
                    rows += [{"device": device, "holder": holder, "since_s": since_s} for device in gang]
            if rows:
                insert_missing(connection, LEASES, rows)
            return are_taken

        return self._database.write(act)

    def give_back(self, devices: Sequence[str]) -> None:
        """Ends the leases on `devices`."""
        self._database.execute_later(delete(LEASES).where(LEASES.c.device.in_(devices)))

    def held(self) -> dict[str, str]:
        """Returns the holder of each device that is leased now."""
        return {row.device: row.holder for row in self._database.rows(select(LEASES))}


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Heartbeat interval and timeouts of a pool.

    All nodes of a pool and its executor must have the same values, or two processes could use one device.

    beat_every_s: the time between two heartbeats of a worker.
    fence_after_s: the time without a stored heartbeat after which a node ends its own ranks.
    lost_after_s: the time without a heartbeat after which the executor gives the node's jobs to other nodes. It exceeds
        `fence_after_s` by more than the time that ending ranks takes.
    """

    beat_every_s: float = 5.0
    lost_after_s: float = 60.0
    fence_after_s: float = 40.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_every_s < self.fence_after_s < self.lost_after_s:
            raise ValueError(
                f"a heartbeat every {self.beat_every_s:g} s, lost after {self.lost_after_s:g} s and fenced after "
                f"{self.fence_after_s:g} s do not go together. To fix: beat < fence < lost"
            )

    @property
    def blind_after_s(self) -> float:
        """The time without a check of the nodes after which an executor restarts the timeouts of all nodes.

        No heartbeat could be seen while the database was unreachable for all processes, so that time is not silence.
        """
        return (self.lost_after_s - self.fence_after_s) / 2

    @classmethod
    def of_environment(cls) -> Self:
        """Returns the values in RINGMASTER_PATIENCE, as "beat,lost,fence" in seconds ("5,60,40" by default)."""
        text = os.environ.get(VARIABLE)
        if text is None:
            return cls()
        try:
            beat_every_s, lost_after_s, fence_after_s = (float(part) for part in text.split(","))
        except ValueError:
            raise ValueError(
                f'{VARIABLE}={text} is not understood. To fix: write "beat,lost,fence" in seconds, as in "5,60,40"'
            ) from None
        return cls(beat_every_s=beat_every_s, lost_after_s=lost_after_s, fence_after_s=fence_after_s)


class NodeStatus(StrEnum):
    """The states of a node in the registry."""

    SERVING = "serving"
    LEAVING = "leaving"  # the node finishes its work and takes no new orders
    LEFT = "left"  # its worker has ended in order; the node is registered no more


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node as its worker last described it.

    incarnation: identifies the worker process. Another worker process on the same node is another incarnation.
    address: the address at which other nodes reach it.
    beats: the number of heartbeats that the worker has sent while it had access to the database and its devices.
    health: by device number (as text), why that device must not be used; empty if all devices are healthy.
    allocation: the id under which an engine lends the machine; empty for a machine of one's own.
    """

    name: str
    incarnation: str
    address: str
    devices: tuple[Device, ...]
    status: NodeStatus = NodeStatus.SERVING
    beats: int = 0
    health: Mapping[str, str] = field(default_factory=dict)
    allocation: str = ""


class NodeRegistry:
    """The registry: each worker writes its own row, and the executor reads all rows."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: KnownDevices = {}

    def register(self, node: NodeRecord) -> None:
        """Registers a node whose worker begins to serve; replaces the row of an earlier worker of the same node.

        Raises ValueError if its devices cannot be planned.
        """
        row = insert(NODES).values(**to_json(_checked(node)), since_s=time.time())
        self._database.execute(delete(NODES).where(NODES.c.name == node.name), row)

    def beat(self, name: str, *, incarnation: str, health: Mapping[str, str], status: str = NodeStatus.SERVING) -> bool:
        """Stores a heartbeat; returns False if the node belongs to another incarnation by now, or was removed."""
        beat = (
            update(NODES)
            .where(NODES.c.name == name, NODES.c.incarnation == incarnation, NODES.c.status != NodeStatus.LEFT)
            .values(beats=NODES.c.beats + 1, health=dict(health), status=status)
        )
        return self._database.execute(beat) > 0

    def remove(self, name: str, *, incarnation: str) -> None:
        """Removes a node that the executor has declared lost."""
        self._database.execute(delete(NODES).where(NODES.c.name == name, NODES.c.incarnation == incarnation))

    def mark_left(self, name: str, *, incarnation: str) -> None:
        """Removes a node whose worker ends in order."""
        now_s, own = time.time(), (NODES.c.name == name, NODES.c.incarnation == incarnation)
        self._database.execute(
            update(NODES).where(*own).values(status=NodeStatus.LEFT, since_s=now_s),
            delete(NODES).where(NODES.c.status == NodeStatus.LEFT, NODES.c.since_s < now_s - LEFT_KEPT_S),
        )

    def left(self) -> frozenset[str]:
        """Returns the incarnations whose workers have ended in order lately."""
        return frozenset(self._database.scalars(select(NODES.c.incarnation).where(NODES.c.status == NodeStatus.LEFT)))

    def note_most_lent(self, num_nodes: int) -> None:
        """Stores how many nodes the pool's engine lends at most; 0 for an engine that lends none."""
        self._database.write(partial(set_about, key=MAX_LENT, value=str(num_nodes)))

    def most_lent(self) -> int:
        """Returns how many nodes the pool's engine lends at most, by the controller that led last."""
        return int(self._database.read(partial(about, key=MAX_LENT)) or 0)

    def expel(self, name: str, *, why: str) -> None:
        """Gives a node, by its name, no work any more."""
        self._database.write(partial(set_about, key=EXPELLED.format(name), value=why))

    def set_reference(self, kind: str, bits: str) -> None:
        """Stores the bits that a calibration has on a kind of devices."""
        self._database.write(partial(set_about, key=REFERENCE.format(kind), value=bits))

    def reference(self, kind: str) -> str | None:
        """Returns the bits that a calibration has on a kind of devices; None where no trusted node has stored them."""
        return self._database.read(partial(about, key=REFERENCE.format(kind)))

    def all(self) -> Sequence[NodeRecord]:
        """Returns every registered node, by name."""
        return self._database.read(partial(read_nodes, known=self._known))


def read_nodes(connection: Connection, *, known: KnownDevices | None = None) -> Sequence[NodeRecord]:
    """Returns every registered node, by name.

    known: the devices of each node as it was read last, which are not converted again while they are the same.

    All devices of an expelled node are unfit for use.
    """
    expelled = dict(connection.execute(select(ABOUT.c.key, ABOUT.c.value)).tuples().all())
    rows = connection.execute(select(NODES).where(NODES.c.status != NodeStatus.LEFT).order_by(NODES.c.name)).all()
    result = [_record(row._mapping, known={} if known is None else known) for row in rows]
    nodes = [record for record in result if record is not None]
    whys = [expelled.get(EXPELLED.format(node.name)) for node in nodes]
    return [
        node if why is None else replace(node, health={str(number): why for number in range(len(node.devices))})
        for node, why in zip(nodes, whys, strict=True)
    ]


def _record(row: Mapping[Any, Any], *, known: KnownDevices) -> NodeRecord | None:
    """Returns the node of a row; None, and logs why once, for one that no controller could use."""
    name, stored = row["name"], row["devices"]
    before, devices, reported = known.get(name, (None, (), ""))
    try:
        if before != stored:
            devices = tuple(from_json(Device, each) for each in stored)
        fields = {key: row[key] for key in ("incarnation", "address", "beats", "allocation")}
        health = {
            str(int(number)): str(why) for number, why in dict(row["health"]).items() if int(number) < len(devices)
        }
        status = NodeStatus(row["status"])
        node = _checked(NodeRecord(name=name, devices=devices, health=health, status=status, **fields))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        fault = f"{type(error).__name__}: {error}"
        if fault != reported:
            logger.error("node %r does not serve, as its row cannot be read: %s", name, fault)
        known[name] = (None, (), fault)
        return None
    known[name] = (stored, devices, "")
    return node


def _checked(node: NodeRecord) -> NodeRecord:
    """Returns a node. Raises ValueError if its devices cannot be planned, which would keep all batches from a plan."""
    numbers = [number for device in node.devices for number in (device.index, device.memory_bytes, *device.cores)]
    if not 0 < len(node.devices) <= MAX_DEVICES or any(device.kind not in ("cpu", "gpu") for device in node.devices):
        raise ValueError(f"node {node.name!r:.100} has no devices that can be planned: {node.devices!r:.200}")
    if not all(type(number) is int and 0 <= number <= MAX_BYTES for number in numbers):
        raise ValueError(f"node {node.name!r:.100} has devices of an impossible size: {node.devices!r:.200}")
    return node
