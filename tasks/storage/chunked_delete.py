"""Deletion of many rows of a table in small transactions, which do not block other writers for long."""

from __future__ import annotations

from functools import partial

from sqlalchemy import ColumnElement, Connection, Table, delete, select

from ringmaster.tasks.storage.database import Database

MOST_ROWS = 5000  # per transaction: all other writers wait for it, including nodes' heartbeats, which must be in time


def delete_in_chunks(
    database: Database, table: Table, where: ColumnElement[bool], *, most_rows: int = MOST_ROWS
) -> int:
    """Deletes the rows that match `where` from a table with an `id` column. Returns their number.

    A row that matches must go on matching: rows left when the process ends are deleted by a later call.
    """
    num_dropped = 0
    while num := database.write(partial(_drop, table=table, where=where, most_rows=most_rows)):
        num_dropped += num
    return num_dropped


def _drop(connection: Connection, *, table: Table, where: ColumnElement[bool], most_rows: int) -> int:
    some = select(table.c.id).where(where).limit(most_rows)
    return int(connection.execute(delete(table).where(table.c.id.in_(some))).rowcount)
