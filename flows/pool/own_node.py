"""The pool node on this machine: its record, and the leases of its devices, for its worker and for trials."""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ringmaster.errors import DevicesBusy, InputError, NodeAlreadyServed, NodeUnavailable
from ringmaster.flows import settings
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.batch.references import NAME_REMEDY
from ringmaster.tasks.cluster import Cluster, Device, Node, detect
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.leases import FileLeases, leases_of
from ringmaster.tasks.pool.node_agent import DRAIN_S
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry, NodeStatus, Timeouts
from ringmaster.tasks.profiling.trials import DevicesWanted, Lend
from ringmaster.tasks.storage.database import Database
from ringmaster.techniques.checkpoints.environment import versions
from ringmaster.techniques.job_features import is_name
from ringmaster.techniques.profiles import UNTRUSTED
from ringmaster.techniques.training.calibration import calibrated_bits


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a node.

    home: RINGMASTER_HOME of this machine.
    pool: address of the pool.
    name: name of the node.
    cluster: the devices that it serves.
    address: address for the other nodes; None for the address of this machine that reaches the pool.
    allocation: the id under which an engine lends the machine; empty for a machine of one's own.
    serves_flows: whether its worker runs flows too.
    drain_s: seconds for gangs to stop at a checkpoint when the worker ends.
    """

    home: Path
    pool: PoolAddress
    name: str
    cluster: Cluster
    address: str | None = None
    allocation: str = ""
    serves_flows: bool = False
    drain_s: float = DRAIN_S

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that it serves, in their order."""
        return self.cluster.devices


def node_name(name: str | None) -> str:
    """Returns the name of this machine's node: the requested one, else the machine's. Raises InputError."""
    name = name or platform.node() or "localhost"
    if not is_name(name):
        raise InputError([f"a node cannot be called {name!r}. To fix: {NAME_REMEDY}"])
    return name


def cluster_of(devices: str) -> Cluster:
    """Returns the devices of this machine that `--devices` names: auto, cpu:N, gpu:N or gpu:all. Raises InputError."""
    kind, colon, number = devices.partition(":")
    try:
        return detect({kind: int(number) if number.isdigit() else number} if colon else devices)
    except ValueError as error:
        raise InputError([f"--devices {devices}: {error}"]) from error


def calibration_of(cluster: Cluster) -> str:
    """Returns the bits that the first device of a machine computes; the others are of the same kind."""
    device = cluster.devices[0]
    return calibrated_bits(kind=device.kind, cores=device.cores, uuid=device.uuid)


def check_calibration(cluster: Cluster, database: Database) -> None:
    """Raises InputError where an untrusted node computes other bits than the trusted nodes of its kind."""
    kind = cluster.device_kind().removesuffix(UNTRUSTED)
    reference = NodeRegistry(database).reference(kind)
    if reference is None:
        why = f"the work of an untrusted node with {kind} could not be verified: no trusted node of that kind is known"
        raise InputError([f"{why}. To fix: `ringmaster pool calibrate` on one, then try again"])
    if (bits := calibration_of(cluster)) != reference:
        why = f"this node computes other bits ({bits}) than trusted nodes with {kind} ({reference})"
        raise InputError([f"{why}. To fix: install the versions of libraries that they have ({dict(versions())} here)"])


WORKER = "worker "  # begins the name of a holder that serves the machine as a node
LEASE_RETRY_S = 1.0
IDLE_WITHIN_S = 120.0  # how long trials wait for idle devices


@dataclass(frozen=True, kw_only=True)
class PoolNode:
    """A node whose devices the pool's controller leases.

    record: the node in the pool's database.
    requests: the requests to the controller.
    """

    record: NodeRecord
    requests: Requests

    @property
    def cluster(self) -> Cluster:
        """A cluster of this node alone, with its healthy devices."""
        return Cluster(nodes=(healthy(self.record),))


@contextmanager
def own_node() -> Iterator[PoolNode | None]:
    """Yields this machine's node if it serves a pool, else None."""
    address = settings.checked_pool()
    if address is None:
        yield None
        return
    with closing(Database(address.database)) as database:
        own = next((node for node in NodeRegistry(database).all() if is_here(node)), None)
        yield None if own is None else PoolNode(record=own, requests=Requests(database))


def is_here(node: NodeRecord) -> bool:
    """Returns whether this process runs on that node, by the variable that the node's worker sets or by host name."""
    return node.status == NodeStatus.SERVING and node.name == os.environ.get(settings.OWN_NODE, platform.node())


def fork_server_of(home: Path, node: str) -> Path:
    """Returns the link to the socket of a node's fork server, which this machine's processes share to save memory."""
    return home / "nodes" / node / "forkserver"


def healthy(node: NodeRecord) -> Node:
    """Returns the node with its healthy devices only."""
    return Node(
        name=node.name,
        devices=tuple(device for number, device in enumerate(node.devices) if str(number) not in node.health),
    )


@contextmanager
def lent(
    requests: Requests,
    node: NodeRecord,
    whose: str,
    wanted: DevicesWanted,
    *,
    timeouts: Timeouts | None = None,
    idle_within_s: float | None = None,
) -> Iterator[tuple[Device, ...]]:
    """Requests idle devices of a node from a pool's controller, yields them, and gives them back.

    The request is renewed by heartbeats while it is open, so that it ends with this process, however that ends.

    node: the node.
    whose: name of the borrower.
    wanted: how many devices, and how urgently.
    timeouts: the pool's timeouts; by default those of the environment.
    idle_within_s: seconds after which the request is given up; None for the trials' default, or for no limit if
        `wanted.presses`.

    Raises DevicesBusy if the devices are not idle in time, NodeUnavailable if the controller refuses.
    """
    beat_every_s = (timeouts or Timeouts.of_environment()).beat_every_s
    if idle_within_s is None:
        idle_within_s = math.inf if wanted.presses else IDLE_WITHIN_S
    content = {"node": node.name, "for": whose, "beats": 0, **asdict(wanted)}
    number = requests.ask(RequestKind.LEND, content)
    until_s = time.monotonic() + idle_within_s
    with ExitStack() as stack:
        stack.callback(requests.answer, number, status=RequestStatus.WITHDRAWN)
        stack.enter_context(requests.renewed(lambda: number, every_s=beat_every_s))
        answer = requests.wait(
            number,
            until=lambda: time.monotonic() > until_s or requests.read(number).status == RequestStatus.WITHDRAWN,
        )
        if answer.status == RequestStatus.OPEN:
            raise DevicesBusy(f"{wanted.least} devices of {node.name} were not idle within {idle_within_s:.0f} s")
        if answer.status != RequestStatus.GRANTED:
            why = answer.answer.get("message", answer.status)
            raise NodeUnavailable([f"the devices of {node.name} cannot be had for trials: {why}"])
        yield tuple(node.devices[int(name.rpartition(":")[2])] for name in answer.answer["devices"])


@contextmanager
def lent_here(
    leases: FileLeases, cluster: Cluster, holder: str, notice: Callable[[str], None], wanted: DevicesWanted
) -> Iterator[tuple[Device, ...]]:
    """Leases idle devices of this machine; waits until its other processes have returned enough of them."""
    names = {name: cluster.device(*place) for place, name in cluster.lease_names().items()}
    reported = False
    while True:
        held = {name: who for name, who in leases.held().items() if name in names}
        lent = wanted.of([name for name in names if name not in held], are_others_at_work=bool(held))
        if lent and leases.take(lent, holder=holder):
            break
        if not reported:
            notice("waiting for devices held by " + ", ".join(sorted(set(held.values()))))
            reported = True
        time.sleep(LEASE_RETRY_S)
    try:
        yield tuple(names[name] for name in lent)
    finally:
        leases.give_back(lent)


def hold_devices(
    leases: FileLeases,
    devices: Sequence[str],
    *,
    worker: str,
    may_share: bool,
    notice: Callable[[str], None],
    wait: Callable[[float], object],
) -> None:
    """Leases `devices` to the worker with that name until this process ends; waits while others have any of them.

    may_share: whether devices that other workers have may be used too, without a lease; for the CPU slots of a machine
        that runs several nodes.
    wait: sleeps that many seconds.

    Raises NodeAlreadyServed.
    """
    reported = ""
    while not leases.take(devices, holder=WORKER + worker):
        holders = {holder for device, holder in leases.held().items() if device in devices}
        if WORKER + worker in holders:
            raise NodeAlreadyServed(
                f"worker {worker} serves this machine already. To fix: end it, or choose another --name"
            )
        if may_share and holders and all(holder.startswith(WORKER) for holder in holders):
            notice(f"devices are shared with {', '.join(sorted(holders))}")
            return
        if (waited_for := ", ".join(sorted(holders))) not in ("", reported):
            reported = waited_for
            notice(f"waiting for devices that are held by {waited_for}")
        wait(LEASE_RETRY_S)


@contextmanager
def own_devices(home: Path, *, whose: str, notice: Callable[[str], None]) -> Iterator[tuple[Cluster, Lend]]:
    """Yields the devices of this machine and what lends them: on a node of a pool its controller, else this home."""
    with own_node() as node:
        if node is not None:
            yield node.cluster, partial(lent, node.requests, node.record, whose)
        else:
            cluster = detect()
            yield cluster, partial(lent_here, leases_of(home, cluster), cluster, whose, notice)
