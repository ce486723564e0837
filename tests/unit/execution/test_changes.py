"""Jobs and devices that come and go while the executor runs."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from tasks.cluster import Cluster
from tasks.execution.events import JobEnded, Planned, SegmentEnded, SegmentStarted
from tasks.execution.introspection import Policy
from tasks.execution.journal import CANCELLED, DONE, FAILED, PAUSED, WAITING, begin
from tasks.execution.orders import LOST
from tasks.planning import Plan, ProblemError
from techniques import registry
from techniques.engine.gang import Outcome
from techniques.engine.reporter import STOP
from tests.unit.execution.clocked import ClockedGangs, clocked_bench
from tests.unit.execution.fakes import cluster, in_a_row, job, profile

CALM = Policy(every=10.0, surprise=10.0)  # plans anew only where it must


def two_nodes():
    (node,) = cluster(1).nodes
    return Cluster(nodes=(replace(node, name="n1"), replace(node, name="n2")))


def over_nodes(problem):
    """Jobs one after another, each on the node that is free first, or where it runs."""
    free_s = {(node.id, i): 0.0 for node in problem.nodes for i in range(node.num_devices)}
    parts = []
    for row in sorted(problem.jobs, key=lambda row: row.running is None):
        device = min(free_s, key=lambda d: (free_s[d], d))
        if row.running is not None:
            ((name, (number,)),) = row.running.devices
            device = (name, number)
        one = in_a_row(replace(problem, jobs=(replace(row, after=()),)))
        start_s = free_s[device]
        free_s[device] += row.options[0].runtime_s
        parts.append(
            replace(one.segments[0], start_s=start_s, end_s=free_s[device], devices=((device[0], (device[1],)),))
        )
    return Plan(problem.name, tuple(parts))


class Pool:
    """An executor that serves on a clock; `at` has something happen at a moment, and `serve` runs to a moment."""

    def __init__(self, folder, names, *, num_steps=100, make_plan=over_nodes, nodes=None, step_s=1.0):
        self.jobs = [job(name, num_steps=num_steps) for name in names]
        speeds = {(n, registry.dotted_path("single"), 1): step_s for n in [*names, "x", "y"]}
        self.gangs = ClockedGangs(speeds)
        self.bench = clocked_bench(folder, self.jobs, self.gangs, make_plan=make_plan, policy=CALM)
        self.executor, self.moments = self.bench.executor, []
        self.executor._cluster = nodes or two_nodes()
        plain_get = self.gangs.get

        def get(timeout=None):
            due = [m for m in self.moments if m[0] <= self.gangs.now_s]
            if due:
                self.moments.remove(due[0])
                return 0, due[0][1]
            next_s = min((m[0] for m in self.moments), default=None)
            if next_s is None:
                return plain_get(timeout)
            left_s = next_s - self.gangs.now_s
            return plain_get(left_s if timeout is None else min(timeout, left_s))

        self.gangs.get = get
        begin(self.bench.journal, self.jobs, faults={})
        self.executor.roster.refresh()

    def at(self, moment_s, action):
        self.moments.append((moment_s, action))

    def serve(self, *, until_s):
        self.at(until_s, self.executor.stop)
        self.executor.replan_soon(why="begin")
        self.executor.serve()

    def lose(self, name):
        """The gang of a job vanishes with its node."""
        folder = next(f for f, g in self.gangs.gangs.items() if g.call.order.job.name == name)
        gang = self.gangs.gangs.pop(folder)
        gang.future.set_result(Outcome(status=LOST, message="its node is gone"))

    @property
    def statuses(self):
        return self.bench.statuses

    def started(self, name):
        return [e for e in self.bench.told(SegmentStarted) if e.segment.job == name]

    def ended_s(self, name):
        return next((i for i, e in enumerate(self.bench.events) if isinstance(e, JobEnded) and e.job == name), None)


def test_a_job_that_comes_later_is_planned_while_the_others_go_on(tmp_path):
    pool = Pool(tmp_path, ["a", "b"])
    late = job("x", num_steps=10)

    def enlist():
        begin(pool.bench.journal, [late], faults={})
        pool.executor.enlist([pool.bench.entry(late, profile())], why="x was added")

    pool.at(50.0, enlist)
    pool.serve(until_s=300.0)
    assert pool.statuses == dict.fromkeys(["a", "b", "x"], DONE)
    assert pool.gangs.heard == [], "what ran never noticed"
    assert [e.why for e in pool.bench.told(Planned)] == ["begin", "x was added"]


def test_a_cancelled_job_stops_at_a_checkpoint_and_those_that_need_it_fail(tmp_path):
    pool = Pool(tmp_path, ["a", "b"])
    child = replace(job("x"), base="a")

    def enlist():
        begin(pool.bench.journal, [child], faults={})
        pool.executor.enlist([pool.bench.entry(child, profile())], why="x was added")

    pool.at(10.0, enlist)
    pool.at(50.0, lambda: pool.executor.cancel(["a"], message="no longer wanted"))
    pool.serve(until_s=300.0)
    assert pool.statuses == {"a": CANCELLED, "b": DONE, "x": FAILED}
    records = pool.bench.journal.jobs()
    assert 49 <= records["a"].step <= 51
    assert records["x"].message == "its base a was cancelled"
    assert [command for _, command in pool.gangs.heard] == [STOP]
    assert len([e for e in pool.bench.told(JobEnded) if e.job == "a"]) == 1


@pytest.mark.parametrize("status", ["invalid", "out_of_memory", "crashed"])
def test_a_cancelled_job_stays_cancelled_whatever_its_gang_comes_to(tmp_path, status):
    pool = Pool(tmp_path, ["a"])

    def cancel():
        pool.executor.cancel(["a"], message="no longer wanted")
        gang = pool.gangs.gangs.pop(next(iter(pool.gangs.gangs)))
        gang.future.set_result(Outcome(status=status, message="its loss is no number"))

    pool.at(50.0, cancel)
    pool.serve(until_s=100.0)
    assert pool.statuses == {"a": CANCELLED}
    assert [event.status for event in pool.bench.told(JobEnded)] == [CANCELLED]


def test_a_paused_job_gives_its_device_away_and_goes_on_where_it_was(tmp_path):
    pool = Pool(tmp_path, ["a", "b", "c"])
    pool.at(40.0, lambda: pool.executor.pause(["a", "c"]))
    statuses = []
    pool.at(150.0, lambda: statuses.append(dict(pool.statuses)))
    pool.at(160.0, lambda: pool.executor.resume(["a", "c"]))
    pool.serve(until_s=500.0)
    assert statuses == [{"a": PAUSED, "b": DONE, "c": PAUSED}]
    assert pool.statuses == dict.fromkeys("abc", DONE)
    assert [e.first_step for e in pool.started("a")] == [0, 40]
    assert [e.first_step for e in pool.started("c")] == [0]


def test_no_device_is_kept_for_what_waits_for_a_paused_base(tmp_path):
    pool = Pool(tmp_path, ["a"], nodes=Cluster(nodes=two_nodes().nodes[:1]))
    child, late = replace(job("x"), base="a"), job("y", num_steps=10)

    def enlist(new):
        begin(pool.bench.journal, [new], faults={})
        pool.executor.enlist([pool.bench.entry(new, profile())], why=f"{new.name} was added")

    pool.at(10.0, lambda: enlist(child))
    pool.at(20.0, lambda: pool.executor.pause(["a"]))
    pool.at(30.0, lambda: enlist(late))
    pool.at(100.0, lambda: pool.executor.resume(["a"]))
    pool.serve(until_s=400.0)
    assert pool.statuses == dict.fromkeys("axy", DONE)
    assert [e.segment.job for e in pool.bench.told(SegmentStarted)] == ["a", "y", "a", "x"]


def test_a_job_that_is_resumed_before_it_has_stopped_just_goes_on(tmp_path):
    pool = Pool(tmp_path, ["a"])

    def change_of_mind():
        pool.executor.pause(["a"])
        pool.executor.resume(["a"])

    pool.at(40.0, change_of_mind)
    pool.serve(until_s=300.0)
    assert pool.statuses == {"a": DONE}


def test_jobs_of_a_lost_node_go_on_elsewhere_from_their_checkpoints(tmp_path):
    pool = Pool(tmp_path, ["a", "b"])
    n1, _ = two_nodes().nodes

    def lose():
        pool.lose("b")
        pool.executor.move_to(Cluster(nodes=(n1,)), why="n2 is lost")

    pool.at(30.0, lose)
    pool.serve(until_s=400.0)
    assert pool.statuses == {"a": DONE, "b": DONE}
    assert [e.segment.devices for e in pool.started("b")] == [(("n2", 0),), (("n1", 0),)]
    assert pool.bench.leases.held() == {}


def test_a_node_that_comes_is_used(tmp_path):
    nodes = two_nodes().nodes
    pool = Pool(tmp_path, ["a", "b"], nodes=Cluster(nodes=nodes[:1]))
    pool.at(10.0, lambda: pool.executor.move_to(Cluster(nodes=nodes), why="n2 came"))
    pool.serve(until_s=115.0)
    assert pool.statuses == {"a": DONE, "b": DONE}
    assert [e.segment.devices for e in pool.started("b")] == [(("n2", 0),)]


def test_a_device_that_must_not_be_used_gets_nothing_new_and_is_left(tmp_path):
    pool = Pool(tmp_path, ["a", "b", "c", "d"])
    pool.at(10.0, lambda: pool.executor.move_to(two_nodes(), out={("n2", 0)}, why="n2's device has errors"))
    pool.serve(until_s=500.0)
    assert set(pool.statuses.values()) == {DONE}
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
        "out": lambda: pool.executor.move_to(pool.executor._cluster, out={("n1", 0)}, why="n1's device has errors"),
    }
    pool.at(41.0, acts[action])
    pool.serve(until_s=100.0)
    assert pool.statuses["a"] == {"cancel": CANCELLED}.get(action, pool.statuses["a"])


def test_where_no_other_device_is_there_a_job_waits_for_one_that_may_be_used(tmp_path):
    pool = Pool(tmp_path, ["a"], nodes=Cluster(nodes=two_nodes().nodes[:1]))
    statuses = []
    pool.at(10.0, lambda: pool.executor.move_to(pool.executor._cluster, out={("n1", 0)}, why="n1's device has errors"))
    pool.at(90.0, lambda: statuses.append(dict(pool.statuses)))
    pool.at(95.0, lambda: pool.executor.move_to(pool.executor._cluster, why="it was reset"))
    pool.serve(until_s=300.0)
    assert statuses == [{"a": WAITING}]
    assert pool.statuses == {"a": DONE}
    assert [e.first_step for e in pool.started("a")] == [0, 10]


def test_what_crashes_on_a_device_that_must_not_be_used_is_not_put_back_there(tmp_path):
    pool = Pool(tmp_path, ["a"])

    def fail():
        pool.executor.move_to(two_nodes(), out={("n1", 0)}, why="n1's device has errors")
        gang = pool.gangs.gangs.pop(next(iter(pool.gangs.gangs)))
        gang.future.set_result(Outcome(status="crashed", message="CUDA error"))
        pool.executor._replanner.void()
        pool.executor._replanner._retry_s = pool.gangs.now_s + 10.0  # a plan takes a while

    pool.at(10.0, fail)
    pool.serve(until_s=300.0)
    assert pool.statuses == {"a": DONE}
    assert [e.segment.devices[0][0] for e in pool.started("a")] == ["n1", "n2"]


def test_without_any_device_jobs_wait_and_start_when_one_comes(tmp_path):
    pool = Pool(tmp_path, ["a"], nodes=Cluster(nodes=()))
    statuses = []
    pool.at(50.0, lambda: statuses.append(dict(pool.statuses)))
    pool.at(60.0, lambda: pool.executor.move_to(two_nodes(), why="nodes came"))
    pool.serve(until_s=200.0)
    assert statuses == [{"a": WAITING}]
    assert pool.statuses == {"a": DONE}


def test_a_held_node_is_cleared_and_serves_again_when_it_is_released(tmp_path):
    pool = Pool(tmp_path, ["a", "b", "c"])
    free = []
    pool.at(20.0, lambda: pool.executor.hold("n1"))
    pool.at(30.0, lambda: free.append((pool.executor.is_free("n1"), pool.executor.is_free("n2"))))
    pool.at(40.0, lambda: pool.executor.release("n1"))
    pool.serve(until_s=500.0)
    assert free == [(True, False)]
    assert pool.statuses == dict.fromkeys("abc", DONE)
    assert [e.first_step for e in pool.started("a")] == [0, 20]


def test_a_plan_that_cannot_be_made_is_tried_again(tmp_path):
    tries = []

    def moody(problem):
        tries.append(pool.gangs.now_s)
        if len(tries) < 3:
            raise ProblemError(["no plan today"])
        return over_nodes(problem)

    pool = Pool(tmp_path, ["a"], make_plan=moody)
    pool.serve(until_s=200.0)
    assert pool.statuses == {"a": DONE}
    assert tries == [0.0, 5.0, 10.0]


def test_a_batch_of_which_nothing_runs_says_why_there_is_no_plan(tmp_path):
    def never_again(problem):
        if pool.bench.plans[1:]:
            raise ProblemError(["no plan any more"])
        return over_nodes(problem)

    pool = Pool(tmp_path, ["a"], make_plan=never_again)
    pool.at(20.0, lambda: pool.lose("a"))
    with pytest.raises(ProblemError, match="no plan any more"):
        pool.executor.run()


def test_a_segment_that_another_executor_started_is_gone_on_with(tmp_path):
    pool = Pool(tmp_path, ["a", "b"])
    pool.serve(until_s=30.0)  # this executor ends; its gangs go on
    running = [r for r in pool.bench.journal.segments() if r.outcome is None]
    assert {r.job for r in running} == {"a", "b"}
    gangs = {g.call.order.job.name: g for g in pool.gangs.gangs.values()}
    pool.gangs.messages.clear()
    again = clocked_bench(
        tmp_path, pool.jobs, pool.gangs, make_plan=over_nodes, policy=CALM, journal=pool.bench.journal
    )
    again.executor._cluster = two_nodes()
    for name in ("n1:cpu:0", "n2:cpu:0"):
        again.leases.take([name], holder="test")
    again.executor.roster.refresh()
    for record in running:
        future = Future()
        gang = gangs[record.job]
        gang.future = future
        gang.call = replace(gang.call, on_event=lambda event, n=record.id: again.executor.said(n, event))
        again.executor.adopt(record.id, record, future)
    pool.moments.append((300.0, again.executor.stop))
    again.executor.replan_soon(why="adopted")
    again.executor.serve()
    assert again.statuses == {"a": DONE, "b": DONE}
    assert again.told(SegmentStarted) == []
    assert len(again.told(SegmentEnded)) == 2
    assert again.leases.held() == {}


def test_a_batch_that_has_ended_is_forgotten(tmp_path):
    pool = Pool(tmp_path, ["a"])
    for name, entry in list(pool.executor.roster.entries.items()):
        pool.executor.roster.entries[name] = replace(entry, batch="batch")
    pool.executor.forget("batch")
    assert pool.executor.roster.left() == []


def test_names_within_a_batch_reach_the_gang(tmp_path):
    pool = Pool(tmp_path, [])
    jobs = [replace(job("night/base"), num_steps=5), replace(job("night/child", base="night/base"), num_steps=5)]
    begin(pool.bench.journal, jobs, faults={})
    pool.gangs.step_s.update({(n, registry.dotted_path("single"), 1): 1.0 for n in ("base", "child")})
    entries = [replace(pool.bench.entry(each, profile()), batch="night") for each in jobs]
    pool.at(0.0, lambda: pool.executor.enlist(entries, why="night"))
    pool.serve(until_s=50.0)
    assert pool.statuses == {"night/base": DONE, "night/child": DONE}
    details = pool.bench.journal.jobs()["night/child"].details
    assert details["model_dir"] == str(tmp_path / "models" / "child")


@pytest.mark.parametrize("status", ["lost", "preempted"])
def test_what_is_nobodys_fault_is_tried_again_without_end(tmp_path, status):
    pool = Pool(tmp_path, ["a"])

    def end_one():
        folder = next(iter(pool.gangs.gangs))
        gang = pool.gangs.gangs.pop(folder)
        gang.future.set_result(Outcome(status=status, message="spot", result={"step": 0}))

    for i in range(8):
        pool.at(10.0 * (i + 1), end_one)
    pool.serve(until_s=400.0)
    assert pool.statuses == {"a": DONE}
