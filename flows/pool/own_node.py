"""The machine that we are on, as a node of a pool: the devices that the pool has of it, kept for trials."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.pool import requests as wishes
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.nodes import SERVING, NodeRecord, Nodes
from ringmaster.tasks.pool.patience import Patience
from ringmaster.tasks.pool.requests import Requests
from ringmaster.tasks.profiling.lending import DevicesBusy, DevicesWanted

IDLE_WITHIN_S = 120.0  # trials wait so long for idle devices


@dataclass(frozen=True, kw_only=True)
class PoolNode:
    """A node whose devices its pool's executor leases."""

    record: NodeRecord
    requests: Requests

    @property
    def cluster(self) -> Cluster:
        """The node alone, with the devices that may be used."""
        return Cluster(nodes=(healthy(self.record),))

    @contextmanager
    def lent(self, whose: str, wanted: DevicesWanted) -> Iterator[tuple[Device, ...]]:
        """Idle devices of the node, which no job that is ready waits for.

        Raises DevicesBusy where there are too few for long, and NodeGone where the executor refuses.
        """
        with lent(self.requests, self.record, whose=whose, wanted=wanted) as devices:
            yield devices


@contextmanager
def own_node() -> Iterator[PoolNode | None]:
    """The machine that we are on, where it serves a pool; None otherwise."""
    address = settings.pool()
    if address is None:
        yield None
        return
    database = Database(address.database)
    try:
        mine = next((node for node in Nodes(database).all() if is_here(node)), None)
        yield None if mine is None else PoolNode(record=mine, requests=Requests(database))
    finally:
        database.close()


def is_here(node: NodeRecord) -> bool:
    """Whether this process runs on that node: as its worker has said, or by the machine's name."""
    return node.status == SERVING and node.name == os.environ.get(settings.OWN_NODE, platform.node())


def healthy(node: NodeRecord) -> Node:
    """The node with those of its devices that may be used."""
    return Node(
        name=node.name,
        devices=tuple(device for number, device in enumerate(node.devices) if str(number) not in node.health),
    )


class NodeGone(InputError):
    """The devices of a node cannot be had, as it has left the pool, for good or for a moment."""


@contextmanager
def lent(
    requests: Requests,
    node: NodeRecord,
    *,
    whose: str,
    wanted: DevicesWanted,
    patience: Patience | None = None,
    idle_within_s: float | None = None,
) -> Iterator[tuple[Device, ...]]:
    """Asks a pool's executor for idle devices of a node, and gives them back.

    The request is renewed for as long as it stands, so that it ends with this process, however that ends.
    idle_within_s: after which it is given up; None for as long as trials wait, or for ever for whoever presses. Raises
    DevicesBusy then, and NodeGone where the executor refuses.
    """
    beat_every_s = (patience or Patience.of_environment()).beat_every_s
    if idle_within_s is None:
        idle_within_s = math.inf if wanted.presses else IDLE_WITHIN_S
    content = {"node": node.name, "for": whose, "beats": 0, **asdict(wanted)}
    number = requests.ask(wishes.LEND, content)
    until_s = time.monotonic() + idle_within_s
    with ExitStack() as stack:
        stack.callback(requests.answer, number, status=wishes.WITHDRAWN)
        stack.enter_context(requests.renewed(lambda: number, every_s=beat_every_s))
        answer = requests.wait(number, until=lambda: time.monotonic() > until_s or is_withdrawn(requests, number))
        if answer.status == wishes.OPEN:
            raise DevicesBusy(f"{wanted.least} devices of {node.name} were not idle within {idle_within_s:.0f} s")
        if answer.status != wishes.GRANTED:
            why = answer.answer.get("message", answer.status)
            raise NodeGone([f"the devices of {node.name} cannot be had for trials: {why}"])
        yield tuple(node.devices[int(name.rpartition(":")[2])] for name in answer.answer["devices"])


def is_withdrawn(requests: Requests, number: int) -> bool:
    """Whether a request stands no more."""
    return requests.read(number).status == wishes.WITHDRAWN
