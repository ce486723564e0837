"""Jobs that are added, cancelled, paused and resumed while the executor runs."""

from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from ringmaster.errors import ProblemError
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.execution_events import JobEnded, PlanUpdate, SegmentEnded, SegmentStarted
from ringmaster.tasks.storage.journal import JobStatus, begin_jobs
from ringmaster.techniques import registry
from ringmaster.techniques.processes.reporter import STOP
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import job, profile
from tests.unit.execution.serving import CALM, Pool, over_nodes, two_nodes


def test_a_job_that_comes_later_is_planned_while_the_others_go_on(tmp_path):
    pool = Pool(tmp_path, ["a", "b"])
    late = job("x", num_steps=10)

    def add_jobs():
        begin_jobs(pool.bench.journal, [late], faults={})
        pool.executor.add_jobs([pool.bench.entry(late, profile())], why="x was added")

    pool.at(50.0, add_jobs)
    pool.serve(until_s=300.0)
    assert pool.statuses == dict.fromkeys(["a", "b", "x"], JobStatus.DONE)
    assert pool.gangs.heard == [], "what ran never noticed"
    assert [e.why for e in pool.bench.told(PlanUpdate)] == ["begin", "x was added"]


def test_a_cancelled_job_stops_at_a_checkpoint_and_those_that_need_it_fail(tmp_path):
    pool = Pool(tmp_path, ["a", "b"])
    child = replace(job("x"), base="a")

    def add_jobs():
        begin_jobs(pool.bench.journal, [child], faults={})
        pool.executor.add_jobs([pool.bench.entry(child, profile())], why="x was added")

    pool.at(10.0, add_jobs)
    pool.at(50.0, lambda: pool.executor.cancel(["a"], message="no longer wanted"))
    pool.serve(until_s=300.0)
    assert pool.statuses == {"a": JobStatus.CANCELLED, "b": JobStatus.DONE, "x": JobStatus.FAILED}
    records = pool.bench.journal.jobs()
    assert 49 <= records["a"].step <= 51
    assert records["x"].message == "its base a was cancelled"
    assert [command for _, command in pool.gangs.heard] == [STOP]
    assert len([e for e in pool.bench.told(JobEnded) if e.job == "a"]) == 1


@pytest.mark.parametrize("order", [["a", "x"], ["x", "a"]])
def test_a_base_and_its_child_that_are_cancelled_together_end_once_each(tmp_path, order):
    pool = Pool(tmp_path, ["a", "b"])
    child = replace(job("x"), base="a")

    def add_jobs():
        begin_jobs(pool.bench.journal, [child], faults={})
        pool.executor.add_jobs([pool.bench.entry(child, profile())], why="x was added")

    pool.at(10.0, add_jobs)
    pool.at(50.0, lambda: pool.executor.cancel(order, message="no longer wanted"))
    pool.serve(until_s=300.0)
    assert pool.statuses == {"a": JobStatus.CANCELLED, "b": JobStatus.DONE, "x": JobStatus.CANCELLED}
    ended = [(event.job, event.record.status) for event in pool.bench.told(JobEnded)]
    assert sorted(ended) == [("a", JobStatus.CANCELLED), ("b", JobStatus.DONE), ("x", JobStatus.CANCELLED)]


@pytest.mark.parametrize("status", ["invalid", "out_of_memory", "crashed"])
def test_a_cancelled_job_stays_cancelled_whatever_its_gang_comes_to(tmp_path, status):
    pool = Pool(tmp_path, ["a"])

    def cancel():
        pool.executor.cancel(["a"], message="no longer wanted")
        pool.gangs.end(pool.gangs.gang("a"), status, "its loss is not a number")

    pool.at(50.0, cancel)
    pool.serve(until_s=100.0)
    assert pool.statuses == {"a": JobStatus.CANCELLED}
    assert [event.record.status for event in pool.bench.told(JobEnded)] == [JobStatus.CANCELLED]


def test_a_paused_job_gives_its_device_away_and_goes_on_where_it_was(tmp_path):
    pool = Pool(tmp_path, ["a", "b", "c"])
    pool.at(40.0, lambda: pool.executor.pause(["a", "c"]))
    statuses = []
    pool.at(150.0, lambda: statuses.append(dict(pool.statuses)))
    pool.at(160.0, lambda: pool.executor.resume(["a", "c"]))
    pool.serve(until_s=500.0)
    assert statuses == [{"a": JobStatus.PAUSED, "b": JobStatus.DONE, "c": JobStatus.PAUSED}]
    assert pool.statuses == dict.fromkeys("abc", JobStatus.DONE)
    assert [e.first_step for e in pool.started("a")] == [0, 40]
    assert [e.first_step for e in pool.started("c")] == [0]


def test_no_device_is_kept_for_what_waits_for_a_paused_base(tmp_path):
    pool = Pool(tmp_path, ["a"], nodes=Cluster(nodes=two_nodes().nodes[:1]))
    child, late = replace(job("x"), base="a"), job("y", num_steps=10)

    def add_jobs(new):
        begin_jobs(pool.bench.journal, [new], faults={})
        pool.executor.add_jobs([pool.bench.entry(new, profile())], why=f"{new.name} was added")

    pool.at(10.0, lambda: add_jobs(child))
    pool.at(20.0, lambda: pool.executor.pause(["a"]))
    pool.at(30.0, lambda: add_jobs(late))
    pool.at(100.0, lambda: pool.executor.resume(["a"]))
    pool.serve(until_s=400.0)
    assert pool.statuses == dict.fromkeys("axy", JobStatus.DONE)
    assert [e.segment.job for e in pool.bench.told(SegmentStarted)] == ["a", "y", "a", "x"]


def test_a_job_that_is_resumed_before_it_has_stopped_just_goes_on(tmp_path):
    pool = Pool(tmp_path, ["a"])

    def change_of_mind():
        pool.executor.pause(["a"])
        pool.executor.resume(["a"])

    pool.at(40.0, change_of_mind)
    pool.serve(until_s=300.0)
    assert pool.statuses == {"a": JobStatus.DONE}


def test_changes_that_come_faster_than_plans_are_made_keep_no_job_waiting(tmp_path):
    pool, began_s = Pool(tmp_path, ["a"], num_steps=400), []

    def think_a_while(think):
        began_s.append(pool.gangs.now_s)
        future = Future()
        pool.at(pool.gangs.now_s + 5.0, lambda: future.set_result(think()))
        return future

    pool.executor._plan_manager.replanner._background = think_a_while
    late = job("x", num_steps=10)

    def add_jobs():
        begin_jobs(pool.bench.journal, [late], faults={})
        pool.executor.add_jobs([pool.bench.entry(late, profile())], why="x was added")

    pool.at(50.0, add_jobs)
    for moment_s in range(48, 300, 3):
        pool.at(float(moment_s), lambda: pool.executor.replan_soon(why="something has changed"))
    statuses = []
    pool.at(80.0, lambda: statuses.append(dict(pool.statuses)))
    pool.serve(until_s=300.0)
    assert statuses[0]["x"] == JobStatus.DONE, "planned by the second plan at the latest"
    assert all(later - earlier >= 5.0 for earlier, later in pairwise(began_s)), "one at a time"


def test_a_plan_that_cannot_be_made_is_tried_again(tmp_path):
    tries = []

    def moody(problem):
        tries.append(pool.gangs.now_s)
        if len(tries) < 3:
            raise ProblemError(["no plan today"])
        return over_nodes(problem)

    pool = Pool(tmp_path, ["a"], make_plan=moody)
    pool.serve(until_s=200.0)
    assert pool.statuses == {"a": JobStatus.DONE}
    assert tries == [0.0, 5.0, 10.0]


def test_a_batch_of_which_nothing_runs_says_why_there_is_no_plan(tmp_path):
    def never_again(problem):
        if pool.bench.plans[1:]:
            raise ProblemError(["no plan any more"])
        return over_nodes(problem)

    pool = Pool(tmp_path, ["a"], make_plan=never_again)
    pool.at(20.0, lambda: pool.lose("a"))
    pool.executor.replan_soon(why="begin")
    with pytest.raises(ProblemError, match="no plan any more"):
        pool.executor.run()


def test_all_that_runs_is_stopped_with_the_executor(tmp_path):
    pool = Pool(tmp_path, ["a", "b", "c"])

    def stop():
        pool.executor.stop_starting()
        pool.executor.call(pool.executor.stop_segments)

    pool.at(30.0, stop)
    pool.executor.replan_soon(why="begin")
    assert not pool.executor.run()
    assert [command for _, command in pool.gangs.heard] == [STOP, STOP]
    assert pool.gangs.steps == {"a": 30, "b": 30}
    assert pool.statuses == dict.fromkeys("abc", JobStatus.WAITING)


def test_a_segment_that_another_executor_started_is_gone_on_with(tmp_path):
    pool = Pool(tmp_path, ["a", "b"])
    pool.serve(until_s=30.0)  # this executor stops, and its gangs continue
    running = [r for r in pool.bench.journal.segments() if r.outcome is None]
    assert {r.job for r in running} == {"a", "b"}
    again = clocked_bench(
        tmp_path, pool.jobs, pool.gangs, make_plan=over_nodes, policy=CALM, journal=pool.bench.journal
    )
    again.executor._plan_manager.cluster = two_nodes()
    for name in ("n1:cpu:0", "n2:cpu:0"):
        again.leases.take_each([[name]], holder="test")
    again.read_journal()
    for record in running:
        future = pool.gangs.adopt(record.id, on_event=partial(again.executor.post, record.id))
        again.executor.adopt(record.id, record, future)
    pool.at(300.0, again.executor.stop_starting)
    again.executor.replan_soon(why="adopted")
    again.executor.serve()
    assert again.statuses == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert again.told(SegmentStarted) == []
    assert len(again.told(SegmentEnded)) == 2
    assert again.leases.held() == {}


def test_a_batch_that_has_ended_is_forgotten(tmp_path):
    pool = Pool(tmp_path, ["a"])
    for name, entry in list(pool.executor.job_table.entries.items()):
        pool.executor.job_table.entries[name] = replace(entry, batch="batch")
    pool.executor.forget("batch")
    assert pool.executor.job_table.left() == []


def test_names_within_a_batch_reach_the_gang(tmp_path):
    pool = Pool(tmp_path, [])
    jobs = [replace(job("night/base"), num_steps=5), replace(job("night/child", base="night/base"), num_steps=5)]
    begin_jobs(pool.bench.journal, jobs, faults={})
    pool.gangs.step_s.update({(n, registry.dotted_path("single"), 1): 1.0 for n in ("base", "child")})
    local = {"night/base": job("base"), "night/child": job("child", base="base")}
    entries = [
        replace(pool.bench.entry(each, profile()), batch="night", job_in_batch=replace(local[each.name], num_steps=5))
        for each in jobs
    ]
    pool.at(0.0, lambda: pool.executor.add_jobs(entries, why="night"))
    pool.serve(until_s=50.0)
    assert pool.statuses == {"night/base": JobStatus.DONE, "night/child": JobStatus.DONE}
    assert pool.bench.journal.jobs()["night/child"].model_dir == str(tmp_path / "models" / "child")


@pytest.mark.parametrize("status", ["lost", "preempted"])
def test_what_is_nobodys_fault_is_tried_again_without_end(tmp_path, status):
    pool = Pool(tmp_path, ["a"])

    def end_one():
        pool.gangs.end(pool.gangs.gang("a"), status, "spot", step=0)

    for i in range(8):
        pool.at(10.0 * (i + 1), end_one)
    pool.serve(until_s=400.0)
    assert pool.statuses == {"a": JobStatus.DONE}
