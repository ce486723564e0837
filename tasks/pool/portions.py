"""Dropping many rows of a pool's tables, without keeping everybody else from writing meanwhile."""

from __future__ import annotations

from functools import partial

from sqlalchemy import ColumnElement, Connection, Table, delete, select

from ringmaster.tasks.pool.database import Database

MOST_ROWS = 5000  # of one transaction: all others wait for it, beats of nodes too, which must not come too late


def drop_in_portions(
    database: Database, table: Table, where: ColumnElement[bool], *, most_rows: int = MOST_ROWS
) -> int:
    """Drops the rows of a table with an `id` that are as `where` says; returns how many. Rows that are as it says stay
    so: what is left of them when the process ends is dropped another time.
    """
    num_dropped = 0
    while num := database.write(partial(_drop, table=table, where=where, most_rows=most_rows)):
        num_dropped += num
    return num_dropped


def _drop(connection: Connection, *, table: Table, where: ColumnElement[bool], most_rows: int) -> int:
    some = select(table.c.id).where(where).limit(most_rows)
    return int(connection.execute(delete(table).where(table.c.id.in_(some))).rowcount)
