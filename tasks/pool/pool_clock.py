"""The clock of a pool, by which all its processes count the times of batches: no step of a machine's clock moves it.

A batch is submitted by one process, planned and trained by another one, and followed by a third. If each of them read
its wall clock, a batch would have lasted a day longer once the wall clock is put forward by a day while it trains.
"""

import time
from collections.abc import Callable

from sqlalchemy import Connection, exists, func, select

from ringmaster.clock import AHEAD_S, SteadyClock, is_of_this_boot
from ringmaster.tasks.pool.submissions import MEASURING, BatchStatus
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import CLOCK
from ringmaster.tasks.storage.journal import clock_record, put_facts, recorded_clock
from ringmaster.tasks.storage.schema import BATCHES, FACTS, SEGMENTS

MAX_AHEAD_S = 1.0  # a larger difference between two clocks is a step, not the time between two readings


class PoolClock:
    """Seconds since the epoch, as the controller of a pool counts and records them for all processes (`Journal.clock`).

    It continues while a batch is measured or has not ended, also under the next controller; else it is set to the wall
    clock. `poll` is called periodically.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._set()

    def __call__(self) -> float:
        """Returns seconds since the epoch."""
        return self._clock()

    def poll(self) -> None:
        """Records a step of the wall clock, and sets the clock to it once no batch counts by the clock."""
        ahead_s = self() - time.time()
        is_stepped = abs(ahead_s - self._ahead_s) >= MAX_AHEAD_S
        if is_stepped or (abs(ahead_s) >= MAX_AHEAD_S and not self._database.read(_is_used)):
            self._set()

    def _set(self) -> None:
        self._clock, self._ahead_s = self._database.write(_set_and_record)


def _set_and_record(connection: Connection) -> tuple[Callable[[], float], float]:
    record = clock_record(connection)
    if record is not None and is_of_this_boot(record) and _is_used(connection):
        clock = recorded_clock(connection)
    else:
        clock = SteadyClock(not_before_s=_newest_s(connection))
        record = clock.to_json()
    ahead_s = clock() - time.time()
    put_facts(connection, {CLOCK: {**record, AHEAD_S: ahead_s}}, batch="")
    return clock, ahead_s


def _is_used(connection: Connection) -> bool:
    """Returns whether a batch is measured or has not ended."""
    is_measured = exists().where(FACTS.c.batch == "", FACTS.c.key.startswith(MEASURING))
    is_active = exists().where(BATCHES.c.status == BatchStatus.SUBMITTED)
    return bool(connection.execute(select(is_measured | is_active)).scalar())


def _newest_s(connection: Connection) -> float:
    """Returns the latest time that is recorded of the batches that have not ended; 0 if there are none."""
    active = select(BATCHES.c.id).where(BATCHES.c.status == BatchStatus.SUBMITTED)
    queries = (
        select(func.max(BATCHES.c.submitted_s)).where(BATCHES.c.status == BatchStatus.SUBMITTED),
        select(func.max(func.coalesce(SEGMENTS.c.ended_s, SEGMENTS.c.started_s))).where(SEGMENTS.c.batch.in_(active)),
    )
    return max(float(connection.execute(query).scalar() or 0.0) for query in queries)
