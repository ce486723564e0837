"""Failover: an executor dies after each of its writes, and the next one loses nothing and repeats nothing."""

from collections import Counter
from dataclasses import replace

import pytest

from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.control.requests import RequestKind, Requests
from ringmaster.tasks.execution.execution_events import GangReport, JobEnded, SegmentEnded, SegmentStarted
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.storage.message_store import MessageStore
from tests.unit.execution.fakes import profile
from tests.unit.pool.bench import Clock, Gangs, PoolBench, submission
from tests.unit.pool.workers import Worker


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


class Killed(BaseException):
    """Stands for the sudden death of the process."""


class Mortal(Database):
    """A database whose process dies after the `last`-th write was committed, before the process learns of it."""

    def __init__(self, database, last):
        self.url, self._database, self.left = database.url, database, last

    def write(self, act):
        self.left -= 1
        assert self.left >= 0, "it is dead"
        result = self._database.write(act)
        if self.left == 0:
            raise Killed
        return result

    def read(self, act):
        return self._database.read(act)


def play(database, *, lives):
    """Runs a batch of three jobs. Each executor but the last dies after as many writes as its number in `lives`."""
    gangs = Gangs(Worker(database, "n1", num_devices=1), Worker(database, "n2", num_devices=1))
    Submissions(database).submit(submission(jobs=("a", "b", "c"), bases={"c": "a"}))
    clock, lives, pool = Clock(), list(lives), None
    for _ in range(200):
        led = Mortal(database, lives[0]) if lives else None
        try:
            pool = pool or PoolBench(database, clock, led=led)
            pool.step(seconds=1.0)
            assert_devices_serve_one(database)
        except Killed:
            lives, pool = lives[1:], None
            continue
        for worker in gangs.workers:
            worker.beat()
        gangs.move()
        if not Submissions(database).unended():
            return pool, gangs
    raise AssertionError(f"it did not end: {pool.statuses()}")


def assert_devices_serve_one(database):
    """Asserts that no device has two orders that have not ended."""
    devices = [
        (order.node, slot.index) for order in MessageStore(database).orders() for slot in order.share.order.slots
    ]
    assert len(devices) == len(set(devices)), f"one serves two: {sorted(devices)}"


def assert_nothing_was_doubled(database, pool, gangs, jobs):
    assert pool.statuses() == dict.fromkeys(jobs, JobStatus.DONE)
    assert pool.held() == {}
    trained = Counter()
    for (_, job), first, last in gangs.trained:
        trained.update((job, step) for step in range(first, last))
    assert trained == Counter((job, step) for job in jobs for step in range(10)), "each step once"
    segments = [segment.id for segment in Journal(database, batch="b1").segments()]
    assert sorted(event.number for event in pool.told(SegmentStarted)) == segments
    assert sorted(event.number for event in pool.told(SegmentEnded)) == segments
    assert sorted(event.job for event in pool.told(JobEnded)) == sorted(jobs)
    heard = Counter((event.number, event.event.NAME) for event in pool.told(GangReport))
    said = Counter((w.segment, w.content.NAME) for w in MessageStore(database).events(after=0))
    assert heard == Counter({key: n for key, n in said.items() if key[1] not in ("outcome", "ended")}), (
        "each word is told once"
    )


def num_writes(tmp_path):
    database = Database(file_url(tmp_path / "count.db"), synced=False)
    counted = Mortal(database, 10_000)
    gangs = Gangs(Worker(database, "n1", num_devices=1), Worker(database, "n2", num_devices=1))
    Submissions(database).submit(submission(jobs=("a", "b", "c"), bases={"c": "a"}))
    pool = PoolBench(database, Clock(), led=counted)
    while Submissions(database).unended():
        pool.step(seconds=1.0)
        gangs.move()
    database.close()
    return 10_000 - counted.left


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_after_any_write_doubles_and_loses_nothing(tmp_path, every):
    total = num_writes(tmp_path)
    assert total > 10
    for last in range(1, total + 1, every):
        database = Database(file_url(tmp_path / f"{last}.db"), synced=False)
        pool, gangs = play(database, lives=[last])
        assert_nothing_was_doubled(database, pool, gangs, "abc")
        database.close()


@pytest.mark.parametrize("last", [2, 5, 11])
def test_executors_that_die_again_and_again_come_to_the_end(tmp_path, database, last):
    pool, gangs = play(database, lives=[last] * 8)
    assert_nothing_was_doubled(database, pool, gangs, "abc")


def test_a_node_that_went_while_no_executor_was_there_is_lost(database):
    clock, gangs = Clock(), Gangs(Worker(database, "n1", num_devices=1), Worker(database, "n2", num_devices=1))
    pool = PoolBench(database, clock)
    pool.submit(submission(jobs=("a", "b")))
    gangs.move(), gangs.move()
    NodeRegistry(database).remove("n1", incarnation="n1-one")
    pool = PoolBench(database, clock)
    pool.step()
    (ended,) = pool.told(SegmentEnded)
    assert (ended.outcome.status, ended.segment.devices) == ("lost", (("n1", 0),))
    gangs.workers = gangs.workers[1:]
    for _ in range(8):
        gangs.move()
        pool.step(seconds=1.0)
    assert pool.statuses() == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert [steps for (_, job), *steps in gangs.trained if job == "a"] == [[0, 5], [5, 7], [7, 10]]


def test_speeds_that_were_told_before_are_known_to_the_next_executor(database):
    clock, worker = Clock(), Worker(database, num_devices=1)
    pool = PoolBench(database, clock)
    pool.submit(submission(jobs=("a", "b"), num_steps=100))
    worker.take_all()
    worker.say(1, "ready", step=0)
    worker.say(1, "steps", first_step=0, seconds=[2.0] * 10)
    pool.step()
    after = PoolBench(database, clock)
    worker.say(1, "steps", first_step=10, seconds=[2.0] * 10)
    after.step()
    (running,) = after.executor._plan_progress.running.values()
    assert (running.step, running.step_s, running.is_ready) == (20, 2.0, True)
    assert [event.event.NAME for event in after.told(GangReport)] == ["ready", "steps", "steps"]
    after.executor.replan_soon(why="to see")
    after.step()
    (row,) = [row for row in after.plans[-1].jobs if row.id == "b1/a"]
    assert row.options[0].runtime_s == pytest.approx(160.0 + 0.1, rel=0.005), (
        "80 steps are left, each twice as long as predicted"
    )


def test_speeds_of_segments_that_have_ended_are_known_to_the_next_executor(database):
    clock, worker = Clock(), Worker(database, num_devices=1)
    pool = PoolBench(database, clock)
    pool.submit(submission(jobs=("a",), num_steps=100))
    worker.take_all()
    worker.say(1, "steps", first_step=0, seconds=[2.0] * 10)
    worker.end(1, "preempted", step=10)
    NodeRegistry(database).remove("n", incarnation=worker.incarnation)
    pool.step()
    Worker(database, incarnation="two", num_devices=1)
    after = PoolBench(database, clock)
    after.step()
    # Ten steps are believed for the most part, so that the 90 that are left take nearly twice as long as predicted.
    assert after.plans[-1].job("b1/a").options[0].runtime_s == pytest.approx(180.0 + 0.1, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "status"), [(RequestKind.PAUSE, JobStatus.PAUSED), (RequestKind.CANCEL, JobStatus.CANCELLED)]
)
def test_a_gang_hears_to_stop_from_the_next_executor_where_the_former_died_before(database, kind, status):
    clock, gangs = Clock(), Gangs(Worker(database))
    pool = PoolBench(database, clock)
    pool.submit(submission(jobs=("a",)))
    gangs.move()
    Journal(database, batch="b1").write_job("a", status=status)  # the state at which the former controller died
    Requests(database).ask(kind, {"batch": "b1", "jobs": []})
    pool = PoolBench(database, clock)
    pool.step()
    assert gangs.workers[0].told(1) == ["stop"]
    gangs.move()
    pool.step(), pool.step()
    assert pool.statuses() == {"a": status}
    assert pool.held() == {}
    assert pool.is_standing() == (kind == RequestKind.PAUSE)


def test_an_option_that_ran_out_of_memory_stays_struck_out(database):
    clock, worker = Clock(), Worker(database, num_devices=1)
    profiles = {"a": (profile(step_s=1.0), profile("ddp", step_s=2.0))}
    pool = PoolBench(database, clock)
    pool.submit(submission(jobs=("a",), profiles=profiles))
    worker.take_all()
    worker.end(1, "out_of_memory", "no room")
    pool.step()
    for executor in (pool, PoolBench(database, clock)):
        executor.step()
        assert executor.statuses() == {"a": JobStatus.RUNNING}
        assert [option.technique for option in executor.plans[-1].job("b1/a").options] == ["ddp"]


def test_options_for_several_kinds_of_devices_are_told_apart_by_the_next_executor(database):
    clock, worker = Clock(), Worker(database, num_devices=1)
    kind = Cluster(nodes=(Node(name="n", devices=worker.record.devices),)).device_kind()
    profiles = (replace(profile(step_s=1.0), device_type=kind), profile(step_s=2.0))
    pool = PoolBench(database, clock)
    pool.submit(submission(jobs=("a",), profiles={"a": profiles}))
    worker.take_all()
    worker.end(1, "out_of_memory", "no room")
    pool.step()
    assert pool.executor.job_table.profiles["b1/a"] == [profiles[1]]
    after = PoolBench(database, clock)
    assert after.executor.job_table.profiles["b1/a"] == [profiles[1]]
    assert [running.segment.option for running in after.executor._plan_progress.running.values()] == [0]


def test_a_node_that_came_back_with_fewer_devices_does_not_stop_the_next_executor(database):
    clock, worker = Clock(), Worker(database, num_devices=2)
    pool = PoolBench(database, clock)
    pool.submit(submission(jobs=("a", "b")))
    worker.take_all()
    Worker(database, incarnation="n-two", num_devices=1)
    after = PoolBench(database, clock)
    after.step()
    assert {event.outcome.status for event in after.told(SegmentEnded)} == {"lost"}
    assert sorted(after.statuses().values()) == [JobStatus.RUNNING, JobStatus.WAITING]
    assert after.held() == {"n:cpu:0": "pool"}


def test_what_a_killed_executor_had_leased_and_not_ordered_is_given_back(database):
    pool = PoolBench(database, Clock())
    pool.submit(submission(jobs=("a",)))
    leases = pool.executor._leases
    assert leases.take(["gone:cpu:3"], holder="pool") and leases.take(["n:cpu:9"], holder="hold 77")
    assert PoolBench(database, pool.clock).held() == {}
