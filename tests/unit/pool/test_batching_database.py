"""The database that carries out many writes of a thread in one transaction."""

import threading

import pytest

from ringmaster.tasks.execution.execution_events import SegmentEnded, SegmentStarted
from ringmaster.tasks.storage.database import BatchingDatabase, Database, file_url
from ringmaster.tasks.storage.journal import JobStatus, Journal, SegmentSpec
from ringmaster.tasks.storage.message_store import MessageStore, OrderStatus
from tests.unit.pool.bench import Clock, Gangs, PoolBench, submission
from tests.unit.pool.test_tables import share
from tests.unit.pool.workers import Worker


class Counted(Database):
    """A database that counts its write transactions."""

    def __init__(self, database):
        self.url, self._database, self.num_writes = database.url, database, 0

    def write(self, act):
        self.num_writes += 1
        return self._database.write(act)

    def read(self, act):
        return self._database.read(act)


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


@pytest.fixture
def counted(database):
    return Counted(database)


@pytest.fixture
def batching(counted):
    return BatchingDatabase(counted)


def commands(database):
    return [command for _, _, command in MessageStore(database).commands(after=0)]


def test_writes_wait_for_the_end_and_share_a_transaction(database, counted, batching):
    store = MessageStore(batching)
    with batching.batched():
        for number in range(5):
            store.command(number, f"c{number}")
        assert commands(database) == []
    assert commands(database) == [f"c{number}" for number in range(5)]
    assert counted.num_writes == 1


def test_outside_of_it_each_write_is_carried_out_at_once(database, counted, batching):
    MessageStore(batching).command(1, "now")
    assert commands(database) == ["now"]
    batching.flush()
    assert counted.num_writes == 1


def test_a_thread_reads_what_it_has_written(batching):
    journal = Journal(batching, batch="b")
    with batching.batched():
        journal.change_jobs({"a": {"status": JobStatus.RUNNING, "goal": 1}})
        assert journal.jobs()["a"].status == JobStatus.RUNNING
        journal.change_jobs({"a": {"step": 3, "rested": 2}})
        record = journal.write_job("a", status=JobStatus.DONE)
    assert (record.step, record.goal, record.rested) == (3, 1, 2)


def test_a_write_with_a_result_takes_those_that_wait_along(counted, batching):
    journal, store = Journal(batching, batch="b", clock=Clock()), MessageStore(batching)
    with batching.batched():
        store.command(1, "before")
        (first, second) = journal.start_segments([("a", SegmentSpec()), ("b", SegmentSpec())])
        assert counted.num_writes == 1
    assert first < second
    assert counted.num_writes == 1, "nothing was left to write"


def test_the_order_of_writes_is_kept(database, batching):
    store = MessageStore(batching)
    with batching.batched():
        store.give(7, batch="b", shares={"n": ("one", share())})
        store.end(7, "n")
        store.give(8, batch="b", shares={"n": ("one", share())})
    statuses = {number: MessageStore(database).shares(number)[0].status for number in (7, 8)}
    assert statuses == {7: OrderStatus.ENDED, 8: OrderStatus.GIVEN}


def test_changes_of_a_job_that_follow_each_other_are_joined(counted, batching):
    journal = Journal(batching, batch="b")
    with batching.batched():
        journal.change_jobs({"a": {"status": JobStatus.RUNNING, "goal": 1, "rested": 1}, "b": {"step": 1}})
        journal.change_jobs({"a": {"step": 3, "rested": 2}, "b": {"message": "slow"}})
        assert counted.num_writes == 0
    record, other = journal.jobs()["a"], journal.jobs()["b"]
    assert (record.status, record.step, record.goal, record.rested) == (JobStatus.RUNNING, 3, 1, 2)
    assert (other.step, other.message) == (1, "slow")
    assert counted.num_writes == 1


def test_another_thread_does_not_wait(database, batching):
    with batching.batched():
        MessageStore(batching).command(1, "mine")
        other = threading.Thread(target=lambda: MessageStore(batching).command(2, "theirs"))
        other.start(), other.join()
        assert commands(database) == ["theirs"]


def test_after_an_exception_nothing_that_waits_is_written(database, batching):
    with pytest.raises(KeyError), batching.batched():
        MessageStore(batching).command(1, "lost")
        raise KeyError
    assert commands(database) == []
    with batching.batched():
        MessageStore(batching).command(1, "again")
    assert commands(database) == ["again"]


def test_orders_whose_commit_was_in_doubt_are_stored_once(database):
    store = MessageStore(database)
    for _ in range(2):
        store.give(7, batch="b", shares={"n": ("one", share())})
    assert len(store.shares(7)) == 1


def num_writes(folder, *, num_jobs):
    """Returns the write transactions in which that many segments start at once, and in which they end at once."""
    database = Database(file_url(folder / f"{num_jobs}.db"), synced=False)
    gangs = Gangs(Worker(database, "n1", num_devices=num_jobs))
    counted = Counted(database)
    pool = PoolBench(database, Clock(), led=counted)
    pool.submit(submission(jobs=[f"j{number}" for number in range(num_jobs)]))
    assert len(pool.told(SegmentStarted)) == num_jobs
    starts = counted.num_writes
    for _ in range(3):
        gangs.move()
    pool.step()
    assert len(pool.told(SegmentEnded)) == num_jobs
    database.close()
    return starts, counted.num_writes - starts


def test_many_segments_that_start_or_end_at_once_take_no_more_transactions_than_few(tmp_path):
    assert num_writes(tmp_path, num_jobs=40) == num_writes(tmp_path, num_jobs=2)
