"""The controller on a fake engine: nodes end, leave and get lost, with or without being fenced."""

from collections import defaultdict

import pytest

from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.execution_events import JobEnded, SegmentEnded, SegmentStarted
from ringmaster.tasks.pool.node_scaler import empty_before_s
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.processes.reporter import STOP
from tests.fake_engine import FakeEngine
from tests.unit.pool.bench import EPOCH_S, Clock, PoolBench, submission

BEGUN_S = Clock().now_s


@pytest.fixture
def engine():
    """An engine whose steps take a second."""
    return FakeEngine(defaultdict(lambda: 1.0), now_s=BEGUN_S, epoch_s=EPOCH_S - BEGUN_S)


@pytest.fixture
def pool(database, engine):
    return PoolBench(database, Clock(), engine=engine)


def started(pool):
    """By job, the nodes on which its segments were started."""
    found = defaultdict(list)
    for event in pool.told(SegmentStarted):
        found[event.segment.job] += [node for node, _ in event.segment.devices]
    return found


def run(pool, *, most_s=2000):
    for _ in range(most_s):
        if not pool.is_standing():
            return
        pool.step(seconds=1.0)
    raise AssertionError(f"it did not end: {pool.statuses()}")


def test_a_batch_is_trained_on_nodes_of_any_engine(pool, engine):
    engine.add("n1"), engine.add("n2")
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a", "b", "c"), bases={"c": "a"}))
    assert sorted(pool.held()) == ["n1:cpu:0", "n2:cpu:0"]
    run(pool)
    assert pool.statuses() == dict.fromkeys("abc", JobStatus.DONE)
    assert [call.job for call in engine.calls] == ["b1/a", "b1/b", "b1/c"]
    assert pool.held() == {}


@pytest.mark.parametrize("is_fenced", [True, False])
def test_the_jobs_of_a_lost_node_go_on_elsewhere(pool, engine, is_fenced):
    engine.add("n1"), engine.add("n2")
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a", "b"), num_steps=100))
    pool.pass_seconds(20)
    engine.lose("n2", is_fenced=is_fenced)
    run(pool)
    assert pool.statuses() == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert started(pool) == {"a": ["n1"], "b": ["n2", "n1"]}
    assert [e.outcome.status for e in pool.told(SegmentEnded)] == ["lost", "done", "done"]


def test_a_device_of_a_node_that_comes_back_is_used_once_it_is_fenced(pool, engine):
    engine.add("n1", 2)
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a",), num_steps=100))
    engine.lose("n1", is_fenced=False)
    pool.pass_seconds(1)
    engine.add("n1", 2)
    pool.pass_seconds(50)
    assert pool.statuses() == {"a": JobStatus.WAITING}
    assert pool.held() == {}
    loan = pool.ask(RequestKind.LEND, node="n1", least=1, most=1)
    assert loan.status == RequestStatus.OPEN, "what survives there uses the devices"
    Requests(pool.database).answer(loan.id, status=RequestStatus.WITHDRAWN)
    engine.fence("n1")
    pool.pass_seconds(1)
    assert pool.statuses() == {"a": JobStatus.RUNNING}
    run(pool)
    assert started(pool) == {"a": ["n1", "n1"]}


def test_the_next_executor_waits_for_the_fence_too(database, pool, engine):
    engine.add("n1")
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a",)))
    engine.lose("n1", is_fenced=False)
    pool.pass_seconds(1)
    engine.add("n1")
    after = PoolBench(database, pool.clock, engine=engine)
    after.pass_seconds(5)
    assert after.statuses() == {"a": JobStatus.WAITING}
    engine.fence("n1")
    run(after)
    assert after.statuses() == {"a": JobStatus.DONE}


def test_the_next_executor_adopts_what_runs(database, pool, engine):
    engine.add("n1"), engine.add("n2")
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a", "b"), num_steps=50))
    pool.pass_seconds(10)
    after = PoolBench(database, pool.clock, engine=engine)
    run(after)
    assert after.statuses() == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert len(engine.calls) == 2


def test_a_node_that_leaves_is_emptied_and_given_back(pool, engine):
    engine.add("n1"), engine.add("n2")
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a", "b"), num_steps=100))
    pool.pass_seconds(20)
    engine.leave("n2")
    pool.pass_seconds(1)
    assert [command for _, command in engine.heard] == [STOP]
    pool.pass_seconds(5)
    assert engine.gangs.keys() == {1}
    assert engine.released == ["n2"]
    run(pool)
    assert pool.statuses() == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert [e.outcome.status for e in pool.told(SegmentEnded)] == ["preempted", "done", "done"]
    assert started(pool) == {"a": ["n1"], "b": ["n2", "n1"]}


def test_devices_of_a_node_that_leaves_are_not_lent(pool, engine):
    engine.add("n1")
    pool.pass_seconds(1)
    lent = pool.ask(RequestKind.LEND, node="n1", least=1, most=1)  # so that the node stays
    assert lent.status == RequestStatus.GRANTED
    waits = pool.ask(RequestKind.LEND, node="n1", least=1, most=1)
    assert waits.status == RequestStatus.OPEN
    engine.leave("n1")
    pool.pass_seconds(1)
    for refused in (
        Requests(pool.database).read(waits.id),
        pool.ask(RequestKind.LEND, node="n1", least=1, most=1),
    ):
        assert refused.status == RequestStatus.REFUSED
        assert "n1 is leaving the pool" in refused.answer["message"]
    assert Requests(pool.database).read(lent.id).status == RequestStatus.GRANTED


def test_a_node_that_leaves_is_not_given_back_while_its_devices_are_lent(pool, engine):
    engine.add("n1")
    pool.pass_seconds(1)
    loan = pool.ask(RequestKind.LEND, node="n1", least=1, most=1)
    assert loan.status == RequestStatus.GRANTED
    engine.leave("n1")
    pool.pass_seconds(5)
    assert engine.released == []
    Requests(pool.database).answer(loan.id, status=RequestStatus.WITHDRAWN)
    pool.pass_seconds(2)
    assert engine.released == ["n1"]


def test_a_node_is_empty_before_it_ends(pool, engine):
    engine.add("n1", ends_s=BEGUN_S + 300.0), engine.add("n2")
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a", "b"), num_steps=350))
    before_s = empty_before_s(pool.executor.job_table)
    assert before_s > 2.0, "a step and a checkpoint take two seconds"
    pool.pass_seconds(300 - int(before_s) - 2)
    assert [gang.nodes for gang in engine.gangs.values()] == [{"n1"}, {"n2"}]
    assert engine.heard == []
    pool.pass_seconds(5)
    assert [gang.nodes for gang in engine.gangs.values()] == [{"n2"}]
    run(pool)
    assert pool.statuses() == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert "lost" not in [e.outcome.status for e in pool.told(SegmentEnded)]
    trained = [event.outcome.result for event in pool.told(SegmentEnded) if event.segment.job == "a"]
    stopped = 300 - int(before_s) - 1
    assert [(each.first_step, each.step) for each in trained] == [(0, stopped), (stopped, 350)], "nothing is lost"


def test_a_node_that_ends_without_notice_loses_what_runs(pool, engine):
    engine.add("n1", ends_s=BEGUN_S + 20.0, is_announced=False), engine.add("n2", faults={0: "ECC errors"})
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a",), num_steps=100))
    pool.pass_seconds(25)
    assert pool.statuses() == {"a": JobStatus.WAITING}
    engine.add("n2")
    run(pool)
    assert started(pool) == {"a": ["n1", "n2"]}


def test_an_outcome_of_any_engine_is_decided_on(pool, engine):
    engine.add("n1")
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a",)))
    engine.end(engine.gang("a"), "invalid", "the loss is not finite")
    pool.step()
    assert [(event.record.status, event.record.message) for event in pool.told(JobEnded)] == [
        (JobStatus.FAILED, "the loss is not finite")
    ]
