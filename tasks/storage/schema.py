"""The tables of a pool, and the check that all its processes run one release, as another one may misread them.

Times are seconds since the epoch, for display: no decision compares clocks.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Float,
    Integer,
    MetaData,
    Table,
    TypeDecorator,
    UniqueConstraint,
    delete,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy import Text as DatabaseText
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from ringmaster.distribution import own_release
from ringmaster.errors import ReleaseMismatch
from ringmaster.text import storable

UNREADABLE = "unreadable"
"""The key, in what is read of a JSON column, of a text that is not JSON, as it was damaged or written by hand."""

METADATA = MetaData()
# The id of tables with many rows: gangs send several events a second. SQLite uses 64 bits for any integer, and
# auto-increments only columns of type INTEGER.
NUMBER = BigInteger().with_variant(Integer, "sqlite")


class json_field(FunctionElement[str]):
    """A field of a JSON column as text, such as `json_field(BATCHES.c.content, "name")`; NULL in a damaged row.

    SQLite's own function fails on the whole query where one row is damaged.
    """

    type = DatabaseText()
    inherit_cache = True


@compiles(json_field)
def _field(element: Any, compiler: Any, **options: Any) -> str:
    column, key = (compiler.process(each, **options) for each in element.clauses)
    return f"({column} ->> CAST({key} AS TEXT))"


@compiles(json_field, "sqlite")
def _field_of_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    column, key = (compiler.process(each, **options) for each in element.clauses)
    return f"CASE WHEN json_valid({column}) THEN {column} ->> {key} END"


class Text(TypeDecorator[str]):
    """Text of any characters: those that a database refuses are stored as escapes."""

    impl = DatabaseText
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Returns the text as it is stored."""
        return None if value is None else storable(value)


# The release of Ringmaster that leads the pool, and the form of these tables (`releases`).
ABOUT = Table("about", METADATA, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

# The nodes that serve. beats: the count of the worker's heartbeats; incarnation: that of the worker.
NODES = Table(
    "nodes",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("incarnation", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("devices", JSON, nullable=False),
    Column("status", Text, nullable=False),
    Column("beats", BigInteger, nullable=False),
    Column("health", JSON, nullable=False),
    Column("since_s", Float, nullable=False),
    Column("allocation", Text, nullable=False, server_default=""),
)

# The pool's controller, in one row. epoch: counts its owners; a former owner finds a higher number and ends.
EXECUTOR = Table(
    "executor",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("beats", BigInteger, nullable=False),
)

# The holder of each leased device.
LEASES = Table(
    "leases",
    METADATA,
    Column("device", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("since_s", Float, nullable=False),
)

BATCHES = Table(
    "batches",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("content", JSON, nullable=False),
    Column("status", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("submitted_s", Float, nullable=False),
)

FACTS = Table(
    "facts",
    METADATA,
    Column("batch", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", JSON, nullable=False),
)

JOBS = Table(
    "jobs",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("batch", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("message", Text, nullable=False),
    Column("details", JSON, nullable=False),
    UniqueConstraint("batch", "name"),
)

SEGMENTS = Table(
    "segments",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("key", Text, nullable=False, unique=True),  # prevents a retried start from being written twice
    Column("batch", Text, nullable=False, index=True),
    Column("job", Text, nullable=False),
    Column("what", JSON, nullable=False),
    Column("started_s", Float, nullable=False),
    Column("ended_s", Float),
    Column("outcome", JSON),
)

PLANS = Table(
    "plans",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("batch", Text, nullable=False, index=True),
    Column("made_s", Float, nullable=False),
    Column("why", Text, nullable=False),
    Column("content", JSON, nullable=False),
)

# The orders of nodes: each node's share of a segment's gang. A segment over several nodes has a row for each.
ORDERS = Table(
    "orders",
    METADATA,
    Column("segment", Integer, primary_key=True, autoincrement=False),
    Column("node", Text, primary_key=True),
    Column("batch", Text, nullable=False),
    Column("content", JSON, nullable=False),
    Column("incarnation", Text, nullable=False),
    Column("status", Text, nullable=False, index=True),
    Column("flow_run", Text),  # not used any more; a change of the columns would be another form of the tables
)

# The events of gangs, for the executor and the followers of a batch.
# number: counts the node's events of this segment, from 0.
GANG_EVENTS = Table(
    "said",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("segment", Integer, nullable=False),
    Column("node", Text, nullable=False),
    Column("number", Integer, nullable=False),
    Column("content", JSON, nullable=False),
    UniqueConstraint("segment", "node", "number"),
)

# The commands to gangs.
COMMANDS = Table(
    "commands",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("segment", Integer, nullable=False),
    Column("command", Text, nullable=False),
)

# The event log: the JSON forms of the executor's decisions, for the followers of a batch.
EVENT_LOG = Table(
    "told",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("batch", Text, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("content", JSON, nullable=False),
    Column("told_s", Float, nullable=False),
)

# The requests of users, flows and nodes to the executor, with its answers.
REQUESTS = Table(
    "requests",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("key", Text, nullable=False, unique=True),
    Column("kind", Text, nullable=False),
    Column("content", JSON, nullable=False),
    Column("status", Text, nullable=False, index=True),
    Column("answer", JSON, nullable=False),
    Column("made_s", Float, nullable=False),
)


TABLES = "2"
"""The version of the tables' form, incremented by every change of a table's columns.

Databases of an earlier version are brought to this one by `UPGRADES`; those of a later version are not opened.
"""

UPGRADES = {"1": ("ALTER TABLE nodes ADD COLUMN allocation TEXT NOT NULL DEFAULT ''",)}
"""By version, the statements that bring its tables to the next version."""

_TABLES, _RELEASE = "tables", "release"


def check_tables(connection: Connection) -> None:
    """Stores the form of the tables in a new database, and brings those of an earlier release to this release's form.

    Raises ReleaseMismatch if the tables have the form of a later release.
    """
    stored = form = about(connection, key=_TABLES)
    if form is None:  # a new database, or one from before the form was stored
        columns = {column["name"] for column in inspect(connection).get_columns(NODES.name)}
        form = TABLES if NODES.c.allocation.name in columns else "1"
    while form in UPGRADES:
        for statement in UPGRADES[form]:
            connection.execute(text(statement))
        form = str(int(form) + 1)
    _check_known(connection, form)
    if form != stored:
        set_about(connection, key=_TABLES, value=form)


def check_form(connection: Connection) -> None:
    """Raises ReleaseMismatch if the tables, which this user may only read, do not have this release's form."""
    if inspect(connection).has_table(ABOUT.name):
        _check_known(connection, about(connection, key=_TABLES))


def _check_known(connection: Connection, form: str | None) -> None:
    if form != TABLES:
        release = about(connection, key=_RELEASE)
        made_by = f" and was led by Ringmaster {release}" if release else ""
        raise ReleaseMismatch(
            [
                f"this database has tables of form {form}{made_by}; Ringmaster {own_release()} has form {TABLES}. "
                "To fix: install one release on all machines, or give the pool a new database; CHANGELOG.md says when "
                "the form changes"
            ]
        )


def note_release(connection: Connection) -> None:
    """Records that an executor of this release leads the pool from now on."""
    set_about(connection, key=_RELEASE, value=own_release())


def check_release(connection: Connection) -> None:
    """Raises ReleaseMismatch if the executor that last led the pool is of another release than this process."""
    if (release := about(connection, key=_RELEASE)) not in (None, own_release()):
        raise ReleaseMismatch(
            [
                f"the pool's controller is of Ringmaster {release}, and this machine has {own_release()}: they would "
                "misread each other. To fix: install one release on all machines, and start the executor first"
            ]
        )


def about(connection: Connection, *, key: str) -> str | None:
    """Returns what is stored about the pool under a key; None if nothing is."""
    value = connection.execute(select(ABOUT.c.value).where(ABOUT.c.key == key)).scalar()
    return None if value is None else str(value)


def set_about(connection: Connection, *, key: str, value: str) -> None:
    """Stores something about the pool, as part of a transaction."""
    connection.execute(delete(ABOUT).where(ABOUT.c.key == key))
    connection.execute(insert(ABOUT).values(key=key, value=value))
