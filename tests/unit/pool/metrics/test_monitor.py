"""What a pool's monitor measures, on a pool with the real executor, a simulated clock and fake gangs."""

from dataclasses import replace

import pytest
from sqlalchemy.exc import OperationalError

from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.execution_events import PredictedEnd, Prediction
from ringmaster.tasks.pool.nodes import LOAN, NodeStatus, PoolLeases
from ringmaster.tasks.pool.pool_monitor import BatchStage, DeviceStatus, PoolMonitor
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import NEWEST_PREDICTION
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import EXECUTOR
from tests.unit.pool.bench import Clock, Gangs, submission, worker_of

DATABASE_AWAY = OperationalError("SELECT 1", {}, Exception("connection refused"))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def monitor(database, clock):
    """A monitor with connections of its own to the pool's database."""
    monitor = PoolMonitor(lambda: Database(database.url, timeout_s=0.0), clock=clock)
    yield monitor
    monitor.close()


def sampled(monitor):
    monitor.sample()
    return monitor.measurement()


def in_states(measured, node="n1"):
    """The devices of a node that are in some state, by state."""
    (found,) = [each.devices for each in measured.state.nodes if each.name == node]
    return {state: number for state, number in found.items() if number}


def test_an_empty_pool(monitor):
    measured = sampled(monitor)
    assert measured.state is not None
    assert (measured.state.nodes, measured.state.leader, measured.state.plan) == ((), None, None)
    assert set(measured.state.batches.values()) == {0}
    assert measured.leader_heartbeat_age_s is None


def test_devices_are_leased_lent_unhealthy_idle_or_on_a_node_that_leaves(monitor, database):
    one, _ = worker_of(database, "n1", num_devices=4), worker_of(database, "n2", num_devices=1)
    leases = PoolLeases(database)
    leases.take(["n1:cpu:0"], holder="pool")
    leases.take(["n1:cpu:1"], holder=LOAN.format(7))
    one.beat(health={"2": "it has fallen off the bus"})
    measured = sampled(monitor)
    assert in_states(measured) == {
        DeviceStatus.LEASED: 1,
        DeviceStatus.LENT: 1,
        DeviceStatus.UNHEALTHY: 1,
        DeviceStatus.IDLE: 1,
    }
    assert in_states(measured, "n2") == {DeviceStatus.IDLE: 1}
    one.beat(health={"2": "it has fallen off the bus"}, status=NodeStatus.LEAVING)
    assert in_states(sampled(monitor))[DeviceStatus.LEAVING] == 1


def test_a_device_that_must_not_be_used_is_unhealthy_while_it_is_leased(monitor, database):
    worker = worker_of(database, "n1", num_devices=1)
    PoolLeases(database).take(["n1:cpu:0"], holder="pool")
    worker.beat(health={"0": "a memory row could not be remapped"})
    assert in_states(sampled(monitor)) == {DeviceStatus.UNHEALTHY: 1}


def test_device_time_is_counted_by_state(monitor, database, clock):
    worker_of(database, "n1", num_devices=3)
    sampled(monitor)
    clock.now_s += 10
    PoolLeases(database).take(["n1:cpu:0"], holder="pool")
    sampled(monitor)
    clock.now_s += 5
    seconds = sampled(monitor).device_seconds
    assert seconds["n1", DeviceStatus.IDLE] == 3 * 10 + 2 * 5
    assert seconds["n1", DeviceStatus.LEASED] == 1 * 5
    assert seconds["n1", DeviceStatus.LENT] == 0


def test_nodes_that_are_gone_have_no_series(monitor, database, clock):
    worker = worker_of(database, "n1")
    sampled(monitor)
    worker.nodes.remove("n1", incarnation=worker.incarnation)
    clock.now_s += 5
    measured = sampled(monitor)
    assert (measured.device_seconds, measured.node_heartbeat_age_s) == ({}, {})


def test_time_without_the_database_is_not_counted_and_the_rest_goes_on(database, clock, caplog):
    worker_of(database, "n1", num_devices=1)
    is_away = []

    class Falling(Database):
        def read(self, act):
            if is_away:
                raise DATABASE_AWAY
            return super().read(act)

    monitor = PoolMonitor(lambda: Falling(database.url, timeout_s=0.0), clock=clock)
    sampled(monitor)
    clock.now_s += 10
    sampled(monitor)
    is_away.append(True)
    for _ in range(3):
        clock.now_s += 10
        measured = sampled(monitor)
        assert measured.state is None
        assert measured.node_heartbeat_age_s == {}
    assert caplog.text.count("does not answer: connection refused") == 1
    is_away.clear()
    clock.now_s += 10
    measured = sampled(monitor)
    assert measured.device_seconds["n1", DeviceStatus.IDLE] == 10
    assert measured.node_heartbeat_age_s == {"n1": 50}
    monitor.close()


def test_a_database_that_cannot_be_opened_yet_is_opened_later(database, clock):
    tries = []

    def open_database():
        tries.append(1)
        if len(tries) == 1:
            raise DATABASE_AWAY
        return Database(database.url)

    monitor = PoolMonitor(open_database, clock=clock)
    assert sampled(monitor).state is None
    assert sampled(monitor).state is not None
    monitor.close()


def test_heartbeats_grow_old_until_another_one_comes(monitor, database, clock):
    worker = worker_of(database, "n1")
    database.write(lambda connection: connection.execute(EXECUTOR.insert().values(id=1, owner="me", epoch=2, beats=0)))
    sampled(monitor)
    clock.now_s += 7
    assert monitor.measurement().node_heartbeat_age_s == {"n1": 7}
    worker.beat()
    measured = sampled(monitor)
    assert measured.node_heartbeat_age_s == {"n1": 0}
    assert (measured.leader_heartbeat_age_s, measured.state.leader.epoch) == (7, 2)
    database.write(lambda connection: connection.execute(EXECUTOR.update().values(beats=1)))
    assert sampled(monitor).leader_heartbeat_age_s == 0


def test_a_leader_that_has_resigned_has_no_heartbeat(monitor, database):
    database.write(lambda connection: connection.execute(EXECUTOR.insert().values(id=1, owner="", epoch=2, beats=0)))
    measured = sampled(monitor)
    assert not measured.state.leader.is_there
    assert measured.leader_heartbeat_age_s is None


def test_batches_by_stage_and_jobs_of_active_batches_by_status(monitor, database):
    requests = Requests(database)
    first, second = (requests.ask(RequestKind.TRAIN, {"batch": {"name": name, "jobs": []}}) for name in ("one", "two"))
    assert sampled(monitor).state.batches[BatchStage.QUEUED] == 2
    requests.answer(first, status=RequestStatus.GRANTED, answer={"flow_run": "run-1"})
    requests.answer(second, status=RequestStatus.GRANTED, answer={"flow_run": "run-2"})
    Submissions(database).submit(
        replace(submission(name="one"), flow_run="run-1"),
        failed={"c": "it has no model"},
    )
    state = sampled(monitor).state
    assert state.batches == {BatchStage.QUEUED: 0, BatchStage.MEASURING: 1, BatchStage.ACTIVE: 1}
    assert state.jobs == {("one", "waiting"): 2, ("one", "failed"): 1}
    Submissions(database).end("b1")
    assert sampled(monitor).state.jobs == {}


def test_predicted_ends_of_the_jobs_of_active_batches_since_the_epoch(monitor, database):
    Submissions(database).submit(submission("b1", name="nightly"))
    end = PredictedEnd(end_s=60.0, low_s=50.0, high_s=80.0, earliest_s=40.0, latest_s=75.0)
    figures = {"makespan_s": 60.0, "low_s": 50.0, "high_s": 80.0, "load": 1.0, "spread": 0.1, "num_earlier": 0}
    prediction = Prediction(**figures, jobs={"a": end}, since_s=1000.0)
    Journal(database, batch="b1").put(NEWEST_PREDICTION, prediction.to_json())
    keys = [("nightly", "a", which) for which in ("earliest", "median", "latest")]
    expected = dict(zip(keys, (1040.0, 1060.0, 1075.0), strict=True))
    assert sampled(monitor).state.ends == pytest.approx(expected, abs=0.1)


def test_batches_of_one_name_count_together(monitor, database):
    Submissions(database).submit(submission("b1", name="nightly"))
    Submissions(database).submit(submission("b2", name="nightly"))
    assert sampled(monitor).state.jobs == {("nightly", "waiting"): 4}


def test_a_batch_is_counted_from_its_plan_to_its_end(monitor, database, pool):
    worker = worker_of(database, "n1")
    pool.step(seconds=5)
    sampled(monitor)
    pool.submit(submission(jobs=("a", "b")))
    for _ in range(3):
        pool.step()
    measured = sampled(monitor)
    assert measured.state.plan is not None and measured.state.plan.makespan_s > 0
    assert measured.counts.plans["new_jobs"] == 1
    assert len(measured.counts.running) == 2
    assert measured.counts.segments == {}
    gangs = Gangs(worker)
    for _ in range(12):
        gangs.move()
        pool.step(seconds=1)
    measured = sampled(monitor)
    assert not measured.counts.running
    assert measured.counts.segments == {"done": 2}
    assert measured.counts.jobs == {"done": 2}
    assert measured.state.batches[BatchStage.ACTIVE] == 0
    again = sampled(monitor).counts
    assert (again.segments, again.jobs, again.plans) == (
        measured.counts.segments,
        measured.counts.jobs,
        measured.counts.plans,
    )


def test_what_happened_before_is_not_counted(monitor, database, pool):
    worker_of(database, "n1")
    pool.submit(submission(jobs=("a",)), failed={"z": "it has no model"})
    pool.step(seconds=5)
    counts = sampled(monitor).counts
    assert (counts.plans, counts.segments, counts.jobs) == ({}, {}, {})
    assert len(counts.running) == 1
