"""Keeps a pool's database small: drops, after a while, what stands elsewhere or serves nobody any more."""

from __future__ import annotations

from sqlalchemy import exists, select

from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.mail import Mail
from ringmaster.tasks.pool.portions import drop_in_portions
from ringmaster.tasks.pool.requests import DONE, REFUSED, WITHDRAWN
from ringmaster.tasks.pool.schema import BATCHES, FACTS, PLANS, REQUESTS, TOLD
from ringmaster.tasks.pool.submissions import ENDED, SUBMITTED

MOST_MAILS = 20  # batches that have ended, of which all that their gangs said is kept: for whoever asks what went wrong
KEPT_S = 90 * 86400.0
EVERY_S = 3600.0
POOLS_OWN = ""  # the batch of a pool's standing plans, which are of all batches together
IS_RECORDED = "is_recorded"  # the fact of a batch of which all has arrived in MLflow


def tidy(database: Database, *, now_s: float, kept_s: float = KEPT_S) -> int:
    """Drops what is older than `kept_s`; returns how many rows.

    That is: requests that were answered; what was told of batches that have ended and are in MLflow completely; and
    standing plans, but for the newest one. Batches, jobs, segments and each batch's first plan are kept for good.
    now_s: seconds since the epoch.
    """
    until_s = now_s - kept_s
    # Facts are kept as lists of one value.
    is_done = (BATCHES.c.id == TOLD.c.batch) & (BATCHES.c.status == ENDED)
    is_recorded = (FACTS.c.batch == TOLD.c.batch) & (FACTS.c.key == IS_RECORDED) & FACTS.c.value[0].as_boolean()
    newest = select(PLANS.c.id).where(PLANS.c.batch == POOLS_OWN).order_by(PLANS.c.id.desc()).limit(1).scalar_subquery()
    of_done_batches = exists().where(is_done).correlate(TOLD) & exists().where(is_recorded).correlate(TOLD)
    drops = {
        REQUESTS: (REQUESTS.c.made_s < until_s) & REQUESTS.c.status.in_((DONE, REFUSED, WITHDRAWN)),
        TOLD: (TOLD.c.told_s < until_s) & of_done_batches,
        PLANS: (PLANS.c.made_s < until_s) & (PLANS.c.batch == POOLS_OWN) & (PLANS.c.id != newest),
    }
    return sum(drop_in_portions(database, table, where) for table, where in drops.items())


def clear_mail(database: Database) -> None:
    """Drops what the gangs of batches said that have ended long ago."""
    mail = Mail(database)
    query = select(BATCHES.c.id).where(BATCHES.c.status != SUBMITTED).order_by(BATCHES.c.submitted_s.desc())
    ended = database.read(lambda connection: connection.execute(query).scalars().all())
    for batch in mail.batches() & set(ended[MOST_MAILS:]):
        mail.clear(batch)
