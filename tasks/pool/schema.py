"""The tables of a pool. Times are seconds since the epoch and for people: nothing is decided by comparing clocks."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Float, Integer, MetaData, Table, Text, UniqueConstraint

METADATA = MetaData()
# Of rows that are written again and again: gangs say several things a second. SQLite counts in 64 bits by itself, and
# counts up only what is called an integer.
NUMBER = BigInteger().with_variant(Integer, "sqlite")

# Which release of ours leads the pool, and the form of these tables (`releases`).
ABOUT = Table("about", METADATA, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

# A node that serves. beats: how often its worker has said that it lives; incarnation: of that worker.
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
)

# Who is the pool's executor: one row. epoch: counts its owners; a former one finds a higher number, and ends.
EXECUTOR = Table(
    "executor",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("beats", BigInteger, nullable=False),
)

# Which device serves whom, and through which incarnation of its node's worker.
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
    Column("key", Text, nullable=False, unique=True),  # so that a start that is tried again is not written twice
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

# What a node is to do for a segment: its share of the gang. A segment over several nodes has a row for each.
ORDERS = Table(
    "orders",
    METADATA,
    Column("segment", Integer, primary_key=True, autoincrement=False),
    Column("node", Text, primary_key=True),
    Column("batch", Text, nullable=False),
    Column("content", JSON, nullable=False),
    Column("incarnation", Text, nullable=False),
    Column("status", Text, nullable=False, index=True),
    Column("flow_run", Text),
)

# What gangs say. number: of the node's words on this segment, from 0.
SAID = Table(
    "said",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("segment", Integer, nullable=False),
    Column("node", Text, nullable=False),
    Column("number", Integer, nullable=False),
    Column("content", JSON, nullable=False),
    UniqueConstraint("segment", "node", "number"),
)

# What gangs are told.
COMMANDS = Table(
    "commands",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("segment", Integer, nullable=False),
    Column("command", Text, nullable=False),
)

# What the executor tells whoever follows a batch: the JSON forms of execution events.
TOLD = Table(
    "told",
    METADATA,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("batch", Text, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("content", JSON, nullable=False),
    Column("told_s", Float, nullable=False),
)

# What people, flows and nodes ask of the executor, and its answer.
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
