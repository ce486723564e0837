"""The tables of an endpoint's SQLite file, and the columns that files of earlier releases lack."""

from __future__ import annotations

import sqlite3

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, metadata TEXT NOT NULL, created_s REAL NOT NULL,
    is_finished INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS clients (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, session TEXT NOT NULL, base TEXT NOT NULL, name TEXT NOT NULL,
    spec TEXT NOT NULL, step INTEGER NOT NULL DEFAULT 0, losses TEXT NOT NULL DEFAULT '[]',
    device_s REAL NOT NULL DEFAULT 0, num_tokens INTEGER NOT NULL DEFAULT 0, created_s REAL NOT NULL,
    active_s REAL NOT NULL, is_ended INTEGER NOT NULL DEFAULT 0, is_recorded INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, session TEXT NOT NULL, base TEXT NOT NULL, checkpoint TEXT,
    num_joined INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, stream TEXT NOT NULL, model TEXT, base TEXT NOT NULL,
    seq INTEGER NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL, work TEXT, answer TEXT, state TEXT NOT NULL,
    step_before INTEGER
);
CREATE INDEX IF NOT EXISTS requests_of_stream ON requests (stream, seq);
CREATE INDEX IF NOT EXISTS requests_of_state ON requests (base, state);
CREATE TABLE IF NOT EXISTS checkpoints (
    uri TEXT PRIMARY KEY, owner TEXT NOT NULL, model TEXT NOT NULL, base TEXT NOT NULL, folder TEXT NOT NULL,
    spec TEXT NOT NULL, step INTEGER NOT NULL, created_s REAL NOT NULL, expires_s REAL,
    is_snapshot INTEGER NOT NULL DEFAULT 0
);
"""
ADDED = {
    "checkpoints": {
        "is_public": "INTEGER NOT NULL DEFAULT 0",
        "metadata": "TEXT NOT NULL DEFAULT '{}'",
        "num_bytes": "INTEGER",
    },
}
"""Columns of each table that were added since the first release."""


def make_tables(connection: sqlite3.Connection) -> None:
    """Makes the tables, and the columns that they lack."""
    connection.executescript(SCHEMA)
    for table, columns in ADDED.items():
        known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        for name, kind in columns.items():
            if name not in known:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
