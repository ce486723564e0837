"""The nodes of a pool, as their workers register them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.schema import NODES
from ringmaster.techniques.values import from_json, to_json

SERVING, LEAVING = "serving", "leaving"


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node as its worker last described it.

    incarnation: names this very worker process; another one on the same node is another incarnation.
    address: by which other nodes reach it. status: "serving", or "leaving" (finishing, takes nothing new).
    beats: how often the worker has said that it lives, with its database and its devices in hand.
    health: by device number (as text), why that device must not be used; empty where all is well.
    """

    name: str
    incarnation: str
    address: str
    devices: tuple[Device, ...]
    status: str = SERVING
    beats: int = 0
    health: Mapping[str, str] = field(default_factory=dict)


class Nodes:
    """The registry: workers write their own row, the executor reads all."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(self, node: NodeRecord) -> None:
        """A worker begins to serve its node; what an earlier one of the same node said is replaced."""

        def act(connection: Connection) -> None:
            connection.execute(delete(NODES).where(NODES.c.name == node.name))
            row = to_json(node)
            connection.execute(insert(NODES).values(**row, since_s=time.time()))

        self._database.write(act)

    def beat(self, name: str, *, incarnation: str, health: Mapping[str, str], status: str = SERVING) -> bool:
        """The worker lives; returns False where the node is another incarnation's by now, or was removed."""

        def act(connection: Connection) -> bool:
            done = connection.execute(
                update(NODES)
                .where(NODES.c.name == name, NODES.c.incarnation == incarnation)
                .values(beats=NODES.c.beats + 1, health=dict(health), status=status)
            )
            return bool(done.rowcount)

        return self._database.write(act)

    def remove(self, name: str, *, incarnation: str) -> None:
        """The node serves no more: its worker has ended in order, or the executor has given it up as lost."""
        self._database.write(
            lambda connection: connection.execute(
                delete(NODES).where(NODES.c.name == name, NODES.c.incarnation == incarnation)
            )
        )

    def all(self) -> Sequence[NodeRecord]:
        """Every node that is registered, by name."""
        rows = self._database.read(lambda connection: connection.execute(select(NODES).order_by(NODES.c.name)).all())
        return [_record(row._mapping) for row in rows]


def _record(row: Mapping[Any, Any]) -> NodeRecord:
    fields = {key: row[key] for key in ("name", "incarnation", "address", "devices", "status", "beats", "health")}
    return from_json(NodeRecord, fields)
