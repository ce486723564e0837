"""Periodic deletion of rows in a pool's database that are stored elsewhere or that are no longer needed."""

from __future__ import annotations

from sqlalchemy import exists, select

from ringmaster.tasks.pool.requests import RequestStatus
from ringmaster.tasks.pool.submissions import BatchStatus
from ringmaster.tasks.storage.chunked_delete import delete_in_chunks
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import BATCHES, FACTS, PLANS, REQUESTS, TOLD

# The number of ended batches whose gangs' events are retained, for the analysis of failures.
MOST_MESSAGES = 20
KEPT_S = 90 * 86400.0
EVERY_S = 3600.0
POOLS_OWN = ""  # the batch of a pool's plans, each of which is for all batches together
IS_RECORDED = "is_recorded"  # the key of the fact that MLflow has all records of a batch


def tidy(database: Database, *, now_s: float, kept_s: float = KEPT_S) -> int:
    """Deletes rows that are older than `kept_s`; returns how many.

    Deleted are: answered requests; the event logs of batches that have ended and whose records MLflow has completely;
    the pool's plans except the newest one. Batches, jobs, segments and each batch's first plan are retained for good.
    now_s: seconds since the epoch.
    """
    until_s = now_s - kept_s
    # Facts are stored as lists of one value.
    is_done = (BATCHES.c.id == TOLD.c.batch) & (BATCHES.c.status == BatchStatus.ENDED)
    is_recorded = (FACTS.c.batch == TOLD.c.batch) & (FACTS.c.key == IS_RECORDED) & FACTS.c.value[0].as_boolean()
    newest = select(PLANS.c.id).where(PLANS.c.batch == POOLS_OWN).order_by(PLANS.c.id.desc()).limit(1).scalar_subquery()
    of_done_batches = exists().where(is_done).correlate(TOLD) & exists().where(is_recorded).correlate(TOLD)
    drops = {
        REQUESTS: (REQUESTS.c.made_s < until_s)
        & REQUESTS.c.status.in_((RequestStatus.DONE, RequestStatus.REFUSED, RequestStatus.WITHDRAWN)),
        TOLD: (TOLD.c.told_s < until_s) & of_done_batches,
        PLANS: (PLANS.c.made_s < until_s) & (PLANS.c.batch == POOLS_OWN) & (PLANS.c.id != newest),
    }
    return sum(delete_in_chunks(database, table, where) for table, where in drops.items())


def clear_messages(database: Database) -> None:
    """Deletes the messages of ended batches whose records MLflow has completely, except the newest `MOST_MESSAGES`.

    The recorder of a batch reads the events of its gangs from the messages, however late it is started again.
    """
    message_store = MessageStore(database)
    query = select(BATCHES.c.id).where(BATCHES.c.status != BatchStatus.SUBMITTED).order_by(BATCHES.c.submitted_s.desc())
    recorded = select(FACTS.c.batch).where(FACTS.c.key == IS_RECORDED, FACTS.c.value[0].as_boolean())
    ended = database.read(lambda connection: connection.execute(query).scalars().all())
    is_recorded = database.read(lambda connection: set(connection.execute(recorded).scalars().all()))
    for batch in message_store.batches() & set(ended[MOST_MESSAGES:]) & is_recorded:
        message_store.clear(batch)
