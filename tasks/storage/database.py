"""The database that a pool shares: PostgreSQL, or a SQLite file on one machine. It tolerates outages.

Write transactions are serialized, by an advisory lock on PostgreSQL and by SQLite itself. So a reader that has read a
table's rows up to a number has read all rows up to it, and row locks are not needed.

`BatchingDatabase` carries out many writes of a thread in one transaction. A transaction costs round trips, the lock of
all writers and a sync of the disk, and hundreds of segments may start or report at once. The writes that have no result
are therefore put off while a thread is inside `batched`. They are carried out in their order, all or none, before that
thread reads or writes anything else.
"""

import errno
import json
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Executable,
    Row,
    Select,
    Table,
    create_engine,
    delete,
    event,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from sqlalchemy.pool import NullPool
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay, wait_exponential

from ringmaster.errors import DatabaseFileError
from ringmaster.extras import missing_extra
from ringmaster.model_lineage.sqlite_files import fault_of, is_disk_full, is_writable, path_of, read_only, sqlite_url
from ringmaster.tasks.storage.schema import METADATA, UNREADABLE, check_form, check_tables
from ringmaster.text import storable

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOCK = 0x52494E47  # the advisory lock of writers on PostgreSQL, an arbitrary number
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
DISK_ERRORS = {"full": errno.ENOSPC, "disk i/o": errno.EIO, "readonly": errno.EROFS}  # by SQLite's words
SQLITE_MAY_PASS = ("locked", "busy", *DISK_ERRORS)
# SQLSTATE: connections, resources (including a full disk), a transaction ended after FROZEN_S, restarts
POSTGRESQL_MAY_PASS = ("08", "53", "25P03", "57P")
FROZEN_S = 5.0  # idle time after which the server ends a transaction, as all other writers wait for it

MAX_ROWS = 5000  # per transaction: all other writers wait for it, including nodes' heartbeats, which must be in time
Act = Callable[[Connection], object]


class Database:
    """Transactions on the database at `url`, each retried while the database is unavailable.

    The functions passed to `read` and `write` may run several times and must tolerate that: a commit whose reply was
    lost is retried. Safe to use from several threads. Raises ReleaseMismatch if the database has tables of another
    release's form, DatabaseFileError if a SQLite file cannot be used.

    A SQLite file that this user may not write can be read; `write` raises DatabaseFileError then.

    url: `sqlite:///FILE` or `postgresql://...`.
    timeout_s: seconds after which a transaction gives up and raises the last database error: an OSError where the disk
        of a SQLite file is full, read-only or damaged. Later transactions then wait no more.
    notice: shows the first fault of a transaction, and that a later try has succeeded; by default they are logged.
    synced: False lets SQLite lose its last transactions on a power failure; for tests.
    is_reader: whether it is only read: a SQLite file on a full disk is then read as one that this user may not write.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = math.inf,
        synced: bool = True,
        notice: Callable[[str], None] = logger.warning,
        is_reader: bool = False,
    ) -> None:
        self.url = url
        self._timeout_s, self._deadline_s = timeout_s, math.inf
        self._notice, self._is_full = notice, False
        self._closing = threading.Event()
        file = Path(path_of(url)) if url.startswith("sqlite:") else None
        self._read_only_file = None
        if file is not None and file.is_file() and (not is_writable(file) or (is_reader and is_disk_full(file))):
            self._read_only_file = file
        try:
            if self._read_only_file is not None:
                self._use(_sqlite_to_read(self._read_only_file))
                self.read(check_form)
            else:
                self._use(_sqlite(url, synced=synced) if file is not None else _postgresql(url))
                self.write(_prepare)
        except DBAPIError as error:
            if fault := self._fault_of(file):
                raise DatabaseFileError([fault]) from error
            raise

    def _use(self, engine: Engine) -> None:
        # PostgreSQL's reads: each statement would have a snapshot of its own anyway, without BEGIN and ROLLBACK.
        reads = {"isolation_level": "AUTOCOMMIT"} if engine.dialect.name == "postgresql" else {}
        self._engine = engine
        self._engines = {
            True: engine.execution_options(ringmaster_writes=True),
            False: engine.execution_options(ringmaster_writes=False, **reads),
        }

    def _fault_of(self, file: Path | None, *, writes: bool | None = None) -> str | None:
        if file is None:
            return None
        writes = self._read_only_file is None if writes is None else writes
        return fault_of(file, contents="its records of runs", writes=writes)

    def write(self, act: Callable[[Connection], T]) -> T:
        """Runs `act` in a write transaction and returns its result. Once this returns, the changes are durable."""
        if self._read_only_file is not None:
            raise DatabaseFileError([self._fault_of(self._read_only_file, writes=True)])
        return self._with_retries(act, writes=True)

    def read(self, act: Callable[[Connection], T]) -> T:
        """Runs `act`, which writes nothing, in a read transaction and returns its result."""
        return self._with_retries(act, writes=False)

    def rows(self, query: Select[Any]) -> Sequence[Row[Any]]:
        """Returns the rows of a query."""
        return self.read(lambda connection: connection.execute(query).all())

    def scalars(self, query: Select[tuple[T]]) -> Sequence[T]:
        """Returns the values of a query of one column."""
        return self.read(lambda connection: connection.execute(query).scalars().all())

    def scalar(self, query: Select[tuple[T]]) -> T | None:
        """Returns the first value of a query of one column; None if it has no row."""
        return self.read(lambda connection: connection.execute(query).scalar())

    def execute(self, *statements: Executable) -> int:
        """Executes statements that write, in one transaction; returns the number of rows that the last one changed."""
        return self.write(lambda connection: [connection.execute(statement).rowcount for statement in statements][-1])

    def execute_later(self, statement: Executable) -> None:
        """Executes a statement as `write_later` does."""
        self.write_later(lambda connection: connection.execute(statement))

    def write_later(self, act: Callable[[Connection], object]) -> None:
        """Runs `act` in a write transaction, at the latest when a surrounding `batched` flushes its writes."""
        self.write(act)

    def insert_later(self, table: Table, **row: Any) -> None:
        """Inserts a row as `write_later` does, unless the table has one with the same unique values."""
        self.write_later(RowsToInsert(table, row))

    def batched(self) -> AbstractContextManager[None]:
        """Lets a database that batches (`BatchingDatabase`) put off this thread's writes; others do nothing."""
        return nullcontext()

    def flush(self) -> None:
        """Carries out the writes that this thread has put off."""

    def close(self) -> None:
        """Closes all connections, those in use once they are returned.

        A transaction that waits for the database gives up with DatabaseClosed.
        """
        self._closing.set()
        self._engine.pool.dispose()

    def hurry(self, timeout_s: float) -> None:
        """Limits the waiting of all transactions to `timeout_s` seconds from now. Can be called from any thread."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + timeout_s)

    def _with_retries(self, act: Callable[[Connection], T], *, writes: bool) -> T:
        began_s, transaction = time.monotonic(), partial(self._try_once, act, writes=writes)
        try:
            try:
                result = transaction()
            except (DBAPIError, NoConnectionFree) as error:
                result = self._try_again(transaction, error, began_s=began_s)
            if self._is_full:
                self._is_full = False
                self._notice(f"{path_of(self.url)} can be written again")
            return result
        except DBAPIError as error:
            if _may_pass(error):
                self.hurry(0.0)
                if (number := _disk_error(error)) is not None:
                    raise OSError(number, os.strerror(number), path_of(self.url)) from error
            raise
        finally:
            if self._closing.is_set():  # closed meanwhile: this connection went back to a pool that was already emptied
                self._engine.pool.dispose()

    def _try_again(self, transaction: Callable[[], T], error: SQLAlchemyError, *, began_s: float) -> T:
        """Repeats a transaction that has failed first, while its errors may pass.

        Only this uses tenacity, which takes half as long as a short transaction.
        """
        is_late, first = stop_before_delay(self._timeout_s - (time.monotonic() - began_s)), iter([error])

        def attempt() -> T:
            for known in first:
                raise known
            return transaction()

        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            stop=lambda state: is_late(state) or time.monotonic() >= self._deadline_s,
            before_sleep=self._report_first,
            sleep=self._wait,
            reraise=True,
        )
        return retrying(attempt)

    def _try_once(self, act: Callable[[Connection], T], *, writes: bool) -> T:
        with self._engines[writes].connect() as connection, connection.begin():
            if writes and connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            return act(connection)

    def _report_first(self, attempt: RetryCallState) -> None:
        """Shows the first failed attempt of a transaction."""
        error = attempt.outcome.exception() if attempt.outcome is not None else None
        if attempt.attempt_number != 1 or not isinstance(error, DBAPIError) or self._is_full:
            return
        if _disk_error(error) is None:
            self._notice(f"the pool's database does not answer, trying again: {error.orig}")
            return
        self._is_full = True
        limit = f" up to {self._timeout_s / 60:.0f} min" if math.isfinite(self._timeout_s) else ""
        why = f"cannot be written: {error.orig}. The run waits{limit} for that"
        self._notice(f"{path_of(self.url)} {why}. To fix: free space on its disk, or make it writable")

    def _wait(self, wait_s: float) -> None:
        if self._closing.wait(wait_s):
            raise DatabaseClosed(f"{self.url} was closed while it was away")


def _prepare(connection: Connection) -> None:
    METADATA.create_all(connection)
    check_tables(connection)


class JoinableWrite(ABC):
    """A write that takes in others of its kind that follow it, so that all of them take few statements."""

    @abstractmethod
    def join(self, later: object) -> bool:
        """Takes in the write that follows this one; returns False, and does nothing, if that is of another kind."""

    @abstractmethod
    def __call__(self, connection: Connection) -> None:
        """Writes."""


class RowsToInsert(JoinableWrite):
    """A write of rows. The order between tables does not matter within a transaction."""

    def __init__(self, table: Table, row: Mapping[str, Any]) -> None:
        self._rows: dict[Table, list[Mapping[str, Any]]] = {table: [row]}

    def join(self, later: object) -> bool:
        """Adds the rows of another write of rows."""
        if not isinstance(later, RowsToInsert):
            return False
        for table, rows in later._rows.items():
            self._rows.setdefault(table, []).extend(rows)
        return True

    def __call__(self, connection: Connection) -> None:
        """Inserts the rows, table by table."""
        for table, rows in self._rows.items():
            insert_missing(connection, table, rows)


class DatabaseClosed(SQLAlchemyError):
    """The database was unavailable while its user closed it."""


def insert_once(connection: Connection, table: Table, **values: Any) -> int:
    """Inserts a row unless there is one with its `key`; returns the id of the row. A transaction may be tried again."""
    (number,) = insert_all_once(connection, table, [values])
    return number


def insert_all_once(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Inserts rows as `insert_once` does, in their order; returns their ids."""
    insert_missing(connection, table, rows)
    query = select(table.c.key, table.c.id).where(table.c.key.in_([row["key"] for row in rows]))
    numbers = {key: int(id) for key, id in connection.execute(query).all()}
    return [numbers[row["key"]] for row in rows]


def insert_missing(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts those of the rows whose unique values the table does not have yet, in their order."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(table).on_conflict_do_nothing(), [*rows])


def json_text(value: Any, *, may_have_nan: bool = True) -> str:
    """Returns the JSON text of a value, without what databases refuse: NUL, and halves of surrogate pairs.

    may_have_nan: whether NaN and infinities stay. PostgreSQL refuses them: a mapping then lacks them, and in a list
        they become null.
    """
    try:
        text = json.dumps(value, allow_nan=may_have_nan)
    except ValueError:
        return json.dumps(json_values(value, may_have_nan=may_have_nan))
    if "\\u0000" in text or "\\ud" in text:
        return json.dumps(json_values(value, may_have_nan=may_have_nan))
    return text


def json_value(text: str) -> Any:
    """Returns the value of a JSON text that is stored. A damaged one, which must not affect other rows, becomes
    an object with the text under UNREADABLE.
    """
    try:
        return json.loads(text)
    except ValueError:
        return {UNREADABLE: str(text)[:1000]}


def json_values(value: Any, *, may_have_nan: bool) -> Any:
    """Returns a JSON value without what databases refuse; see `json_text`."""

    def is_stored(item: Any) -> bool:
        return may_have_nan or not isinstance(item, float) or math.isfinite(item)

    clean = partial(json_values, may_have_nan=may_have_nan)
    if isinstance(value, Mapping):
        return {storable(str(key)): clean(item) for key, item in value.items() if is_stored(item)}
    if isinstance(value, (list, tuple)):
        return [clean(item) if is_stored(item) else None for item in value]
    return storable(value) if isinstance(value, str) else value


def file_url(file: Path) -> str:
    """Returns the URL of a SQLite file, whose folder is created."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return sqlite_url(file)


def _disk_error(error: DBAPIError) -> int | None:
    """Returns the number of the disk's error for which SQLite has failed; None for another reason."""
    if not type(error.orig).__module__.startswith("sqlite3"):
        return None
    return next((number for word, number in DISK_ERRORS.items() if word in str(error.orig).lower()), None)


def _may_pass(error: BaseException) -> bool:
    """Whether a retry may succeed: the server is unavailable or has no space for now, or all connections are in use."""
    if isinstance(error, NoConnectionFree):  # many threads wait for an unavailable database: no reason to give up
        return True
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return str(state).startswith(POSTGRESQL_MAY_PASS)
    text = str(error.orig).lower()
    if type(error.orig).__module__.startswith("sqlite3"):
        return any(word in text for word in SQLITE_MAY_PASS)
    return type(error.orig).__name__ == "OperationalError"  # psycopg could not connect: no SQLSTATE


def _sqlite(url: str, *, synced: bool) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": 30, "check_same_thread": False},
        json_serializer=json_text,
        json_deserializer=json_value,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # BEGIN is issued explicitly below
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if synced else 'OFF'}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("ringmaster_writes", True)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _sqlite_to_read(file: Path) -> Engine:
    """Returns an engine that opens the file again for each transaction, as others may begin to write it meanwhile."""
    return create_engine(
        "sqlite://",
        creator=lambda: read_only(file, check_same_thread=False),
        poolclass=NullPool,
        json_deserializer=json_value,
    )


def _postgresql(url: str) -> Engine:
    if fault := missing_extra("pool", feature="a database on PostgreSQL"):
        raise DatabaseFileError([fault])
    return create_engine(
        url.replace("postgresql://", "postgresql+psycopg://", 1),
        pool_size=4,
        json_serializer=lambda value: json_text(value, may_have_nan=False),
        json_deserializer=json_value,
        connect_args={
            "connect_timeout": 10,
            # Detects a server that vanished with its node within seconds instead of TCP's two hours.
            "keepalives_idle": 5,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 15_000,
            # Lets the server end the transaction of a client that is frozen or lost and still holds the lock.
            "options": f"-c idle_in_transaction_session_timeout={round(1000 * FROZEN_S)}",
        },
    )


def delete_in_chunks(database: Database, table: Table, where: ColumnElement[bool], *, most_rows: int = MAX_ROWS) -> int:
    """Deletes the rows that match `where` from a table with an `id` column. Returns their number.

    A row that matches must continue matching: rows left when the process ends are deleted by a later call.
    """
    num_dropped = 0
    while num := database.write(partial(_drop, table=table, where=where, most_rows=most_rows)):
        num_dropped += num
    return num_dropped


def _drop(connection: Connection, *, table: Table, where: ColumnElement[bool], most_rows: int) -> int:
    some = select(table.c.id).where(where).limit(most_rows)
    return int(connection.execute(delete(table).where(table.c.id.in_(some))).rowcount)


class BatchingDatabase(Database):
    """The same database, whose `write_later` and `insert_later` wait inside `batched`.

    A process that dies inside `batched` has carried out none of the writes that waited. What it does meanwhile must
    therefore not be visible to others except through this database. After an exception inside `batched`, the writes
    that wait are dropped as well.
    """

    def __init__(self, database: Database) -> None:
        self.url = database.url
        self._database, self._of_thread = database, threading.local()

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Puts off the writes of this thread; carries them out at the end."""
        assert self._waiting is None, "`batched` is not nested"
        self._of_thread.waiting = []
        try:
            yield
            self.flush()
        finally:
            self._of_thread.waiting = None

    def flush(self) -> None:
        """Carries out the writes that wait, in one transaction."""
        if self._waiting:
            self.write(lambda connection: None)

    def write_later(self, act: Act) -> None:
        """See `Database.write_later`."""
        waiting = self._waiting
        if waiting is None:
            self._database.write(act)
        elif not (waiting and isinstance(last := waiting[-1], JoinableWrite) and last.join(act)):
            waiting.append(act)

    def write(self, act: Callable[[Connection], T]) -> T:
        """Runs `act` in a write transaction, after the writes that wait; returns its result."""
        waiting = self._waiting
        if not waiting:
            return self._database.write(act)
        self._of_thread.waiting = []

        def all_of_them(connection: Connection) -> T:
            for each in waiting:
                each(connection)
            return act(connection)

        return self._database.write(all_of_them)

    def read(self, act: Callable[[Connection], T]) -> T:
        """Carries out the writes that wait, then runs `act` in a read transaction; returns its result."""
        self.flush()
        return self._database.read(act)

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    @property
    def _waiting(self) -> list[Act] | None:
        """The writes of this thread that wait; None outside of `batched`."""
        waiting: list[Act] | None = getattr(self._of_thread, "waiting", None)
        return waiting
