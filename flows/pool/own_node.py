"""The machine that we are on, as a node of a pool: the devices that the pool has of it, kept for trials."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from flows import settings
from flows.faults import InputError
from tasks.cluster import Cluster, Node
from tasks.pool import requests as wishes
from tasks.pool.database import Database
from tasks.pool.nodes import SERVING, NodeRecord, Nodes
from tasks.pool.patience import Patience
from tasks.pool.requests import Requests
from tasks.profiling.stage import Notice


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
    def held(self, whose: str, notice: Notice) -> Iterator[None]:
        """Keeps all devices of the node free: what runs there writes a checkpoint and goes on elsewhere or later.

        Raises NodeGone where the executor refuses.
        """
        with held(self.requests, self.record.name, whose=whose, notice=notice):
            yield


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
def held(
    requests: Requests, node: str, *, whose: str, notice: Notice, patience: Patience | None = None
) -> Iterator[None]:
    """Asks a pool's executor for all devices of a node, and gives them back.

    The request is renewed for as long as it stands, so that it ends with this process, however that ends.
    """
    beat_every_s = (patience or Patience.of_environment()).beat_every_s
    number = requests.ask(wishes.HOLD, {"node": node, "for": whose, "beats": 0})
    with ExitStack() as stack:
        stack.callback(requests.answer, number, status=wishes.WITHDRAWN)
        stack.enter_context(requests.renewed(lambda: number, every_s=beat_every_s))
        notice(f"waiting for the devices of {node}: what runs there writes a checkpoint first")
        answer = requests.wait(number, until=lambda: requests.read(number).status == wishes.WITHDRAWN)
        if answer.status != wishes.GRANTED:
            why = answer.answer.get("message", answer.status)
            raise NodeGone([f"the devices of {node} cannot be had for trials: {why}"])
        yield
