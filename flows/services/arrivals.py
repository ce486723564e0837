"""Detects in the pool's database that the executor and the node that were started have begun to serve."""

from __future__ import annotations

from sqlalchemy import Connection, select

from ringmaster.tasks.pool.nodes import Nodes
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import EXECUTOR


class Members:
    """The executor and nodes that have begun to serve in `database` since this object was made."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._nodes = Nodes(database)
        self._executor_before = self._executor()
        self._nodes_before = {(node.incarnation, node.beats) for node in self._nodes.all()}

    def leader(self) -> str | None:
        """Returns a message once a new executor leads and has sent a heartbeat; None before."""
        executor = self._executor()
        return None if executor in (None, self._executor_before) else "an executor leads"

    def node(self) -> str | None:
        """Returns a message that names a node once one has registered or sent a heartbeat; None before."""
        for node in self._nodes.all():
            if (node.incarnation, node.beats) not in self._nodes_before:
                return f"node {node.name}: {len(node.devices)} devices of kind {node.devices[0].kind}"
        return None

    def close(self) -> None:
        """Closes the connections."""
        self._database.close()

    def _executor(self) -> tuple[str, int] | None:
        def look(connection: Connection) -> tuple[str, int] | None:
            row = connection.execute(select(EXECUTOR.c.owner, EXECUTOR.c.beats)).one_or_none()
            return (row.owner, row.beats) if row is not None and row.owner else None

        return self._database.read(look)
