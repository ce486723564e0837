"""Concurrent users of a pool's database wait for each other, however many there are."""

import sqlite3
import threading

import pytest
from sqlalchemy import func, insert, select

from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.schema import COMMANDS


def test_where_all_connections_are_taken_whoever_comes_waits_for_one(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    database.write(lambda connection: connection.execute(insert(COMMANDS).values(segment=1, command="stop")))
    connections = database._engine.pool
    most = connections.size() + connections._max_overflow
    connections._timeout = 0.01
    all_busy, over, found = threading.Barrier(most + 1), threading.Event(), []

    def hold(connection):
        all_busy.wait(120)
        over.wait(120)

    def look():
        found.append(database.read(lambda connection: connection.execute(select(func.count(COMMANDS.c.id))).scalar()))

    holders = [threading.Thread(target=database.read, args=(hold,)) for _ in range(most)]
    for thread in holders:
        thread.start()
    all_busy.wait(120)
    latecomer = threading.Thread(target=look)
    latecomer.start()
    latecomer.join(0.2)
    over.set()
    for thread in [*holders, latecomer]:
        thread.join(120)
    assert found == [1]
    database.close()


def test_a_connection_that_is_in_use_when_the_database_is_closed_is_closed_after_it(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    reads, may_go_on, used = threading.Event(), threading.Event(), []

    def read(connection):
        used.append(connection.connection.dbapi_connection)
        reads.set()
        may_go_on.wait(60)

    reader = threading.Thread(target=database.read, args=(read,))
    reader.start()
    assert reads.wait(60)
    database.close()
    may_go_on.set()
    reader.join()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        used[0].execute("SELECT 1")
