"""The ledger of device leases of all nodes of a pool, in the pool's database.

A lease outlives the process that took it. The executor that takes over finds it, and ends it if its holder is gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import Connection, delete, select

from ringmaster.tasks.storage.database import Database, insert_missing
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
        (is_taken,) = self.take_each([devices], holder=holder)
        return is_taken

    def take_each(self, gangs: Sequence[Sequence[str]], *, holder: str) -> list[bool]:
        """Leases the devices of each gang as `take` does, in one transaction; returns which were leased."""
        since_s = time.time()  # identifies this call among all of the holder's, in case its commit is retried

        def act(connection: Connection) -> list[bool]:
            query = select(LEASES).where(LEASES.c.device.in_([device for gang in gangs for device in gang]))
            found = connection.execute(query).all()
            busy = {row.device for row in found if (row.holder, row.since_s) != (holder, since_s)}
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
        ended = delete(LEASES).where(LEASES.c.device.in_(devices))
        self._database.write_later(lambda connection: connection.execute(ended))

    def held(self) -> dict[str, str]:
        """Returns the holder of each device that is leased now."""
        rows = self._database.read(lambda connection: connection.execute(select(LEASES)).all())
        return {row.device: row.holder for row in rows}
