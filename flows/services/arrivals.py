"""Whether the executor and the node that were started have arrived in the pool's database."""

from __future__ import annotations

from sqlalchemy import Connection, select

from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.nodes import Nodes
from ringmaster.tasks.pool.schema import EXECUTOR


class Members:
    """What has happened in `database` since this was made; `close` closes it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._nodes = Nodes(database)
        self._executor_before = self._executor()
        self._nodes_before = {(node.incarnation, node.beats) for node in self._nodes.all()}

    def leader(self) -> str | None:
        """Says that an executor leads, once one has beaten; None before."""
        executor = self._executor()
        return None if executor in (None, self._executor_before) else "an executor leads"

    def node(self) -> str | None:
        """Says which node serves, once one has registered or beaten; None before."""
        for node in self._nodes.all():
            if (node.incarnation, node.beats) not in self._nodes_before:
                return f"node {node.name}: {len(node.devices)} devices of kind {node.devices[0].kind}"
        return None

    def close(self) -> None:
        """Ends the connections."""
        self._database.close()

    def _executor(self) -> tuple[str, int] | None:
        def look(connection: Connection) -> tuple[str, int] | None:
            row = connection.execute(select(EXECUTOR.c.owner, EXECUTOR.c.beats)).one_or_none()
            return (row.owner, row.beats) if row is not None and row.owner else None

        return self._database.read(look)
