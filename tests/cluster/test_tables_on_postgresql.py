"""The tests of a pool's database, repeated on PostgreSQL, and with restarts of its server."""

import threading

import pytest
from sqlalchemy import func, insert, select

from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import FACTS
from tests.unit.pool import test_batch_events, test_tables
from tests.unit.pool.controller import test_maintenance

# It counts what SQLAlchemy decodes, and here the driver decodes JSON.
ON_FILES = ("test_a_loss_value_is_written_once_and_read_twice_on_its_way_to_a_recorder",)
for module in (test_tables, test_batch_events, test_maintenance):
    globals().update({n: test for n, test in vars(module).items() if n.startswith("test_") and n not in ON_FILES})


@pytest.fixture
def database(postgresql_url):
    database = Database(postgresql_url, timeout_s=300)
    yield database
    database.close()


def write_fact(connection, key):
    connection.execute(insert(FACTS).values(batch="b", key=key, value=1))


def num_facts(database):
    return database.read(lambda connection: connection.execute(select(func.count()).select_from(FACTS)).scalar_one())


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_restart_in_the_middle_of_a_write_leaves_it_done_once(database, postgresql, how):
    calls = []

    def act(connection):
        calls.append("begun")
        write_fact(connection, "first")
        if len(calls) == 1:
            postgresql.restart(how)
        write_fact(connection, "second")

    database.write(act)
    assert len(calls) == 2
    assert num_facts(database) == 2


def test_reads_and_writes_wait_for_a_server_that_is_away(database, postgresql):
    postgresql.stop()
    writer = threading.Thread(target=database.write, args=(lambda connection: write_fact(connection, "late"),))
    writer.start()
    try:
        writer.join(timeout=1)
        assert writer.is_alive()
    finally:
        postgresql.start()
    writer.join(timeout=300)
    assert num_facts(database) == 1


def test_writers_come_one_after_another(database, postgresql_url):
    """Numbers follow the order of commits: a reader of all rows up to a number misses none below it."""
    other = Database(postgresql_url, timeout_s=300)
    entered, seen = threading.Event(), []

    def slow(connection):
        write_fact(connection, "slow")
        entered.set()
        second.join(timeout=0.5)
        seen.append("slow")

    def quick(connection):
        seen.append("quick")

    second = threading.Thread(target=lambda: (entered.wait(), other.write(quick)))
    second.start()
    try:
        database.write(slow)
        second.join(timeout=300)
    finally:
        other.close()
    assert seen == ["slow", "quick"]
