"""The ledger of device leases of all nodes of a pool, in the pool's database.

A lease outlives the process that took it. The executor that takes over finds it, and ends it if its holder is gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import LEASES

LOAN = "loan {}"
"""The holder of the leases of a request for devices, by the request's number. All other leases are of segments."""


def is_loan(holder: str) -> bool:
    """Returns whether a lease belongs to a request for devices, and not to a segment."""
    return holder.startswith(LOAN.format(""))


class PoolLeases:
    """The leases of a pool's devices, named "node:kind:number". Safe between threads and between processes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, devices: Sequence[str], *, holder: str) -> bool:
        """Leases all of `devices` to `holder`, or none of them if one is leased; returns whether they were leased.

        A device that the same holder has leased counts as leased too: one holder may act for many users that must not
        share the device.
        """
        since_s = time.time()  # identifies this call among all of the holder's, in case its commit is retried

        def act(connection: Connection) -> bool:
            query = select(LEASES.c.holder, LEASES.c.since_s).where(LEASES.c.device.in_(devices))
            found = connection.execute(query).all()
            if found:
                return all((row.holder, row.since_s) == (holder, since_s) for row in found)
            if not devices:
                return True
            rows = [{"device": device, "holder": holder, "since_s": since_s} for device in devices]
            connection.execute(insert(LEASES), rows)
            return True

        return self._database.write(act)

    def give_back(self, devices: Sequence[str]) -> None:
        """Ends the leases on `devices`."""
        self._database.write(lambda connection: connection.execute(delete(LEASES).where(LEASES.c.device.in_(devices))))

    def held(self) -> dict[str, str]:
        """Returns the holder of each device that is leased now."""
        rows = self._database.read(lambda connection: connection.execute(select(LEASES)).all())
        return {row.device: row.holder for row in rows}
