"""The pool node on this machine: its record, and the lease of its idle devices for trials."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ringmaster.errors import DevicesBusy, NodeUnavailable
from ringmaster.flows import settings
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.pool import requests as wishes
from ringmaster.tasks.pool.nodes import NodeRecord, Nodes, NodeStatus, Timeouts
from ringmaster.tasks.pool.requests import Requests
from ringmaster.tasks.profiling.trials import DevicesWanted
from ringmaster.tasks.storage.database import Database

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
    def lent(self, whose: str, wanted: DevicesWanted) -> Iterator[tuple[Device, ...]]:
        """Yields idle devices of the node that no ready job waits for.

        Raises DevicesBusy if there are too few for too long, NodeUnavailable if the controller refuses.
        """
        with lent(self.requests, self.record, whose=whose, wanted=wanted) as devices:
            yield devices


@contextmanager
def own_node() -> Iterator[PoolNode | None]:
    """Yields this machine's node if it serves a pool, else None."""
    address = settings.pool()
    if address is None:
        yield None
        return
    with closing(Database(address.database)) as database:
        mine = next((node for node in Nodes(database).all() if is_here(node)), None)
        yield None if mine is None else PoolNode(record=mine, requests=Requests(database))


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
    *,
    whose: str,
    wanted: DevicesWanted,
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
    number = requests.ask(wishes.RequestKind.LEND, content)
    until_s = time.monotonic() + idle_within_s
    with ExitStack() as stack:
        stack.callback(requests.answer, number, status=wishes.RequestStatus.WITHDRAWN)
        stack.enter_context(requests.renewed(lambda: number, every_s=beat_every_s))
        answer = requests.wait(number, until=lambda: time.monotonic() > until_s or is_withdrawn(requests, number))
        if answer.status == wishes.RequestStatus.OPEN:
            raise DevicesBusy(f"{wanted.least} devices of {node.name} were not idle within {idle_within_s:.0f} s")
        if answer.status != wishes.RequestStatus.GRANTED:
            why = answer.answer.get("message", answer.status)
            raise NodeUnavailable([f"the devices of {node.name} cannot be had for trials: {why}"])
        yield tuple(node.devices[int(name.rpartition(":")[2])] for name in answer.answer["devices"])


def is_withdrawn(requests: Requests, number: int) -> bool:
    """Returns whether a request was withdrawn."""
    return requests.read(number).status == wishes.RequestStatus.WITHDRAWN
