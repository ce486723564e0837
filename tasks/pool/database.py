"""The database that a pool shares: PostgreSQL, or a SQLite file on one machine. It may go away, and come back.

Writers come one after another, on PostgreSQL by an advisory lock as on SQLite by nature: so whoever has read a table's
rows up to a number has read all of them up to there, and nobody needs row locks.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from ringmaster.tasks.pool.releases import check_tables
from ringmaster.tasks.pool.schema import METADATA

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOCK = 0x52494E47  # of our writers on PostgreSQL, a number of our own choosing
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
SQLITE_MAY_PASS = ("locked", "busy", "full", "disk i/o")
# SQLSTATE: connections, resources (a full disk too), a transaction that was ended as FROZEN_S says, restarts
POSTGRESQL_MAY_PASS = ("08", "53", "25P03", "57P")
FROZEN_S = 5.0  # within a transaction, after which the server ends it: all other writers wait for it meanwhile


class Database:
    """Transactions on the database at `url`, each tried again for as long as it is away.

    Raises OtherRelease where it has tables of another form than ours.

    url: `sqlite:///FILE` or `postgresql://...`. patience_s: seconds after which a transaction gives up, and raises what
    the database said last. synced: False lets SQLite lose its last transactions with the machine's power, for tests.
    Safe between threads. What is given to `read` and `write` may run several times and must do no harm then: a commit
    whose answer was lost is tried again.
    """

    def __init__(self, url: str, *, patience_s: float = math.inf, synced: bool = True) -> None:
        self.url = url
        self._patience_s = patience_s
        self._closing = threading.Event()
        self._engine = _sqlite(url, synced=synced) if url.startswith("sqlite:") else _postgresql(url)
        self.write(_prepare)

    def write(self, act: Callable[[Connection], T]) -> T:
        """What `act` returns; what it wrote is kept for good, or it was not called to its end."""
        return self._patiently(act, writes=True)

    def read(self, act: Callable[[Connection], T]) -> T:
        """What `act` returns, which writes nothing."""
        return self._patiently(act, writes=False)

    def close(self) -> None:
        """Ends the connections, those in use when they are not any more; a transaction that waits for the database
        gives up.
        """
        self._closing.set()
        self._engine.pool.dispose()

    def _patiently(self, act: Callable[[Connection], T], *, writes: bool) -> T:
        try:
            return self._try_patiently(act, writes=writes)
        finally:
            if self._closing.is_set():  # meanwhile: our connection went back to a pool that nobody will empty again
                self._engine.pool.dispose()

    def _try_patiently(self, act: Callable[[Connection], T], *, writes: bool) -> T:
        deadline_s = time.monotonic() + self._patience_s
        wait_s = FIRST_WAIT_S
        while True:
            try:
                with (
                    self._engine.connect().execution_options(ringmaster_writes=writes) as connection,
                    connection.begin(),
                ):
                    if writes and connection.dialect.name == "postgresql":
                        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
                    return act(connection)
            except DBAPIError as error:
                if not _may_pass(error) or time.monotonic() + wait_s > deadline_s:
                    raise
                if wait_s == FIRST_WAIT_S:
                    logger.warning("the pool's database does not answer, trying again: %s", error.orig)
            except NoConnectionFree:  # many threads wait for a database that is away: no reason for any to give up
                if time.monotonic() + wait_s > deadline_s:
                    raise
            if self._closing.wait(wait_s):
                raise DatabaseClosed(f"{self.url} was closed while it was away")
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _prepare(connection: Connection) -> None:
    METADATA.create_all(connection)
    check_tables(connection)


class DatabaseClosed(SQLAlchemyError):
    """The database was away, and whoever used it is ending."""


def file_url(file: Path) -> str:
    """The address of a SQLite file, whose folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{file.absolute()}"


def _may_pass(error: DBAPIError) -> bool:
    """Whether the same transaction may go well later: the server is away, or has no room just now."""
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return str(state).startswith(POSTGRESQL_MAY_PASS)
    said = str(error.orig).lower()
    if type(error.orig).__module__.startswith("sqlite3"):
        return any(word in said for word in SQLITE_MAY_PASS)
    return type(error.orig).__name__ == "OperationalError"  # psycopg could not connect: no SQLSTATE


def _sqlite(url: str, *, synced: bool) -> Engine:
    engine = create_engine(url, connect_args={"timeout": 30, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if synced else 'OFF'}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("ringmaster_writes", True)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: str) -> Engine:
    return create_engine(
        url.replace("postgresql://", "postgresql+psycopg://", 1),
        pool_pre_ping=True,
        pool_size=4,
        connect_args={
            "connect_timeout": 10,
            # A server that vanished with its node must be noticed in seconds, not in the two hours of TCP.
            "keepalives_idle": 5,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 15_000,
            # And the server must notice one of us that is frozen, or gone with its node, and still has the lock.
            "options": f"-c idle_in_transaction_session_timeout={round(1000 * FROZEN_S)}",
        },
    )
