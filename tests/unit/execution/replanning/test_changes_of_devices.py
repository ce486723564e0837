"""Devices and nodes that join and leave while the executor runs."""

import pytest

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.execution_events import SegmentStarted
from ringmaster.tasks.storage.journal import JobStatus
from tests.unit.execution.serving import Pool, two_nodes


def test_jobs_of_a_lost_node_go_on_elsewhere_from_their_checkpoints(tmp_path):
    pool = Pool(tmp_path, ["a", "b"])
    n1, _ = two_nodes().nodes

    def lose():
        pool.lose("b")
        pool.executor.move_to(Cluster(nodes=(n1,)), why="n2 is lost")

    pool.at(30.0, lose)
    pool.serve(until_s=400.0)
    assert pool.statuses == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert [e.segment.devices for e in pool.started("b")] == [(("n2", 0),), (("n1", 0),)]
    assert pool.bench.leases.held() == {}


def test_a_node_that_comes_is_used(tmp_path):
    nodes = two_nodes().nodes
    pool = Pool(tmp_path, ["a", "b"], nodes=Cluster(nodes=nodes[:1]))
    pool.at(10.0, lambda: pool.executor.move_to(Cluster(nodes=nodes), why="n2 came"))
    pool.serve(until_s=115.0)
    assert pool.statuses == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert [e.segment.devices for e in pool.started("b")] == [(("n2", 0),)]


def test_a_device_that_must_not_be_used_gets_nothing_new_and_is_left(tmp_path):
    pool = Pool(tmp_path, ["a", "b", "c", "d"])
    pool.at(10.0, lambda: pool.executor.move_to(two_nodes(), out={("n2", 0)}, why="n2's device has errors"))
    pool.serve(until_s=500.0)
    assert set(pool.statuses.values()) == {JobStatus.DONE}
    assert [e.segment.devices[0][0] for e in pool.bench.told(SegmentStarted)] == ["n1", "n2", "n1", "n1", "n1"]
    assert [e.first_step for e in pool.started("b")] == [0, 10], "it was moved away"


@pytest.mark.parametrize("action", ["cancel", "hold", "out"])
def test_while_the_only_gang_stops_nobody_looks_again_and_again(tmp_path, action):
    pool = Pool(tmp_path, ["a"], step_s=20.0, nodes=Cluster(nodes=two_nodes().nodes[:1]))
    turns, turn = [], pool.executor._turn

    def counted():
        turns.append(pool.gangs.now_s)
        assert len(turns) < 500, f"it turns and turns at {turns[-1]} s"
        turn()

    pool.executor._turn = counted
    acts = {
        "cancel": lambda: pool.executor.cancel(["a"], message="no longer wanted"),
        "hold": lambda: pool.executor.hold("n1"),
        "out": lambda: pool.executor.move_to(
            pool.executor._plan_manager.cluster, out={("n1", 0)}, why="n1's device has errors"
        ),
    }
    pool.at(41.0, acts[action])
    pool.serve(until_s=100.0)
    assert pool.statuses["a"] == {"cancel": JobStatus.CANCELLED}.get(action, pool.statuses["a"])


def test_where_no_other_device_is_there_a_job_waits_for_one_that_may_be_used(tmp_path):
    alone = Cluster(nodes=two_nodes().nodes[:1])
    pool = Pool(tmp_path, ["a"], nodes=alone)
    statuses = []
    pool.at(
        10.0,
        lambda: pool.executor.move_to(alone, out={("n1", 0)}, why="n1's device has errors"),
    )
    pool.at(90.0, lambda: statuses.append(dict(pool.statuses)))
    pool.at(95.0, lambda: pool.executor.move_to(alone, why="it was reset"))
    pool.serve(until_s=300.0)
    assert statuses == [{"a": JobStatus.WAITING}]
    assert pool.statuses == {"a": JobStatus.DONE}
    assert [e.first_step for e in pool.started("a")] == [0, 10]


def test_what_crashes_on_a_device_that_must_not_be_used_is_not_put_back_there(tmp_path):
    pool = Pool(tmp_path, ["a"])

    def fail():
        pool.executor.move_to(two_nodes(), out={("n1", 0)}, why="n1's device has errors")
        pool.gangs.end(pool.gangs.gang("a"), "crashed", "CUDA error")
        pool.executor._plan_manager.replanner.void()
        pool.executor._plan_manager.replanner._retry_s = pool.gangs.now_s + 10.0  # the next plan is due later

    pool.at(10.0, fail)
    pool.serve(until_s=300.0)
    assert pool.statuses == {"a": JobStatus.DONE}
    assert [e.segment.devices[0][0] for e in pool.started("a")] == ["n1", "n2"]


def test_without_any_device_jobs_wait_and_start_when_one_comes(tmp_path):
    pool = Pool(tmp_path, ["a"], nodes=Cluster(nodes=()))
    statuses = []
    pool.at(50.0, lambda: statuses.append(dict(pool.statuses)))
    pool.at(60.0, lambda: pool.executor.move_to(two_nodes(), why="nodes came"))
    pool.serve(until_s=200.0)
    assert statuses == [{"a": JobStatus.WAITING}]
    assert pool.statuses == {"a": JobStatus.DONE}


def test_a_held_node_is_cleared_and_serves_again_when_it_is_released(tmp_path):
    pool = Pool(tmp_path, ["a", "b", "c"])
    free = []
    pool.at(20.0, lambda: pool.executor.hold("n1"))
    pool.at(30.0, lambda: free.append((pool.executor.is_free("n1"), pool.executor.is_free("n2"))))
    pool.at(40.0, lambda: pool.executor.release("n1"))
    pool.serve(until_s=500.0)
    assert free == [(True, False)]
    assert pool.statuses == dict.fromkeys("abc", JobStatus.DONE)
    assert [e.first_step for e in pool.started("a")] == [0, 20]
