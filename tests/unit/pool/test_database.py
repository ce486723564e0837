"""Concurrent users of a pool's database wait for each other, however many there are."""

import sqlite3
import threading

import pytest
from sqlalchemy import func, insert, select
from sqlalchemy.exc import OperationalError

from ringmaster.tasks.storage.database import Database, DatabaseClosed, file_url
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

    def poll():
        found.append(database.read(lambda connection: connection.execute(select(func.count(COMMANDS.c.id))).scalar()))

    holders = [threading.Thread(target=database.read, args=(hold,)) for _ in range(most)]
    for thread in holders:
        thread.start()
    all_busy.wait(120)
    latecomer = threading.Thread(target=poll)
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


class FakeClosing(threading.Event):
    """The event that a database waits for between attempts; it is set at a given wait, and never by default."""

    def __init__(self, *, set_at: int = -1) -> None:
        super().__init__()
        self.waits_s: list[float] = []
        self._set_at = set_at

    def wait(self, timeout: float | None = None) -> bool:
        self.waits_s.append(timeout)
        if len(self.waits_s) == self._set_at:
            self.set()
        return self.is_set()


def away(num_times, *, why="database is locked"):
    """A transaction that fails a number of times, and then returns its number of attempts."""
    attempts = []

    def act(connection):
        attempts.append(connection)
        if len(attempts) <= num_times:
            raise OperationalError("SELECT 1", {}, sqlite3.OperationalError(why))
        return len(attempts)

    return act


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def test_an_outage_is_waited_for_with_growing_delays_and_reported_once(database, monkeypatch, caplog):
    closing = FakeClosing()
    monkeypatch.setattr(database, "_closing", closing)
    assert database.write(away(7)) == 8
    assert closing.waits_s == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        "the pool's database does not answer, trying again"
    ]


def test_a_fault_that_stays_is_raised_at_once(database, monkeypatch):
    closing = FakeClosing()
    monkeypatch.setattr(database, "_closing", closing)
    with pytest.raises(OperationalError, match="no such table"):
        database.read(away(1, why="no such table"))
    assert closing.waits_s == []


def test_who_waits_for_a_database_that_is_closed_gives_up(database, monkeypatch):
    monkeypatch.setattr(database, "_closing", FakeClosing(set_at=3))
    with pytest.raises(DatabaseClosed, match="was closed while it was away"):
        database.read(away(9))


def test_without_patience_the_first_fault_is_raised(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), timeout_s=0.0, synced=False)
    with pytest.raises(OperationalError, match="locked"):
        database.read(away(1))
    database.close()
