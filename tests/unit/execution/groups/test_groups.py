"""Jobs that one gang trains together: each has its own record, and continues alone where the group cannot."""

from dataclasses import replace

import pytest

from ringmaster.tasks.execution.execution_events import JobEnded, SegmentEnded, SegmentStarted
from ringmaster.tasks.execution.steering import SteeringRequest
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques import registry
from ringmaster.techniques.processes.gang_events import CheckpointSaved, JobOfGroupEnded, JobResult, Outcome
from ringmaster.techniques.processes.reporter import STOP, leave_command
from ringmaster.techniques.profiles import GroupMemberProfile
from tests.unit.execution.fakes import Bench, FakeRunner, ends, job, profile
from tests.unit.execution.groups.grouped import GroupBench, all_done, bench_of, group, outcome_of, stopped_at

SHARED = registry.dotted_path("shared_base")


def test_one_gang_trains_all_and_each_has_its_own_end(tmp_path):
    bench = bench_of(tmp_path, all_done)
    assert bench.run()
    (call,) = bench.runner.calls
    assert call.order.technique == SHARED
    assert [(o.job.name, o.last_step, o.technique) for o in call.order.members] == [
        ("b", 10, SHARED),
        ("c", 10, SHARED),
    ]
    assert len({o.checkpoint_dir for o in (call.order, *call.order.members)}) == 3
    assert bench.statuses == dict.fromkeys("abc", JobStatus.DONE)
    assert sorted(event.job for event in bench.told(JobEnded)) == ["a", "b", "c"]
    assert bench.told(SegmentStarted)[0].members == bench.told(SegmentEnded)[0].members == ("b", "c")
    assert all(bench.journal.jobs()[name].metrics == {"loss": 1.0} for name in "abc")


def test_the_planner_sees_one_job_that_takes_as_long_as_all_of_them(tmp_path):
    bench = bench_of(tmp_path, all_done)
    bench.run()
    (row,) = bench.plans[0].jobs
    assert (row.id, row.members) == ("a", ("b", "c"))
    assert row.options[0].runtime_s == pytest.approx(10 * (1.0 + 0.5 + 0.5))


def test_a_segment_is_told_as_each_jobs_own(tmp_path):
    bench = bench_of(tmp_path, all_done)
    bench.run()
    for name in "abc":
        (segment,) = bench.journal.segments(name)
        assert (segment.job, segment.spec.technique) == (name, "shared_base")
        assert (segment.outcome.status, segment.outcome.step) == ("done", 10)
    assert len(bench.journal.segments()) == 1


def test_a_fellow_that_is_through_is_done_while_the_gang_goes_on(tmp_path):
    seen = []

    def act(call, runner):
        order = call.order.members[0]
        call.on_event(JobOfGroupEnded(job="b", outcome=outcome_of(call, runner, order)))
        return stopped_at(5, "c")

    def second(call, runner):
        seen.append(([o.job.name for o in call.order.members], bench.statuses["b"]))
        return all_done(call, runner)

    bench = bench_of(tmp_path, act, second)
    assert bench.run()
    assert seen == [(["c"], JobStatus.DONE)]
    assert [e.job for e in bench.told(JobEnded)].count("b") == 1


def test_what_a_fellow_checkpoints_is_its_own_step(tmp_path):
    def act(call, runner):
        call.on_event(CheckpointSaved(job="b", step=4, seconds=0.1))
        call.on_event(CheckpointSaved(job="a", step=3, seconds=0.1))
        return Outcome(status="crashed", message="as it should")

    bench = bench_of(tmp_path, act, all_done)
    assert bench.run()
    assert bench.journal.segments("b")[1].spec.first_step == 4
    assert bench.journal.segments("a")[1].spec.first_step == 3


def test_an_invalid_fellow_fails_alone(tmp_path):
    broken = JobResult(status="invalid", step=3, message="the loss became nan")
    bench = bench_of(tmp_path, lambda call, runner: all_done(call, runner, b=broken))
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.DONE, "b": JobStatus.FAILED, "c": JobStatus.DONE}
    assert bench.journal.jobs()["b"].message == "the loss became nan"


def failing_leader(call, runner):
    members = [order.job.name for order in call.order.members]
    runner.steps |= dict.fromkeys(members, 3)
    return stopped_at(3, members, status="invalid", message="the loss became nan")


def test_where_the_leader_fails_another_job_leads_the_group(tmp_path):
    bench = bench_of(tmp_path, failing_leader)
    bench.runner.script["b"] = [all_done]
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.FAILED, "b": JobStatus.DONE, "c": JobStatus.DONE}
    second = bench.runner.calls[1]
    assert (second.order.technique, second.order.job.name) == (SHARED, "b")
    assert [order.job.name for order in second.order.members] == ["c"]
    assert bench.plans[-1].jobs[0].options[0].runtime_s == pytest.approx(7 * (1.0 + 0.5 + 0.5))


def test_the_last_job_of_a_group_goes_on_by_itself(tmp_path):
    bench = bench_of(tmp_path, failing_leader, names="ab")
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.FAILED, "b": JobStatus.DONE}
    assert bench.runner.calls[1].order.technique == registry.dotted_path("single")


def test_leaders_follow_each_other_also_in_another_process(tmp_path):
    def act(call, runner):
        bench.executor.stop_starting()
        return failing_leader(call, runner)

    bench = bench_of(tmp_path, failing_leader, names="abcd")
    bench.runner.script["b"] = [act]
    assert not bench.run()
    bench.journal.close()
    again = GroupBench(tmp_path, bench.jobs, runner=FakeRunner(steps=bench.runner.steps, script={"c": [all_done]}))
    assert again.run()
    by_lead = {call.order.job.name: [order.job.name for order in call.order.members] for call in again.runner.calls}
    assert by_lead["c"] == ["d"]
    assert again.statuses == dict.fromkeys("abcd", JobStatus.DONE)


def test_a_job_that_leads_after_another_one_since_an_earlier_release_does_so_still(tmp_path):
    jobs = [job(name, num_steps=10) for name in "abcd"]
    runner = FakeRunner(script={"c": [all_done]}, steps=dict.fromkeys("abcd", 2))
    before = GroupBench(tmp_path, jobs)
    for name, changes in {
        "a": {"status": JobStatus.DONE, "parted": True},
        "b": {"status": JobStatus.DONE, "parted": True, "leads_after": "a"},
        "c": {"step": 2, "leads_after": "b"},
        "d": {"step": 2},
    }.items():
        before.journal.write_job(name, **changes)
    before.journal.close()
    bench = GroupBench(tmp_path, jobs, runner=runner)
    assert bench.run()
    assert [[o.job.name for o in (c.order, *c.order.members)] for c in runner.calls] == [["c", "d"]]
    records = bench.journal.jobs()
    assert set(records["c"].joined) == set("abd") and records["c"].leads_after is None


def test_a_gang_that_keeps_crashing_parts(tmp_path):
    bench = bench_of(tmp_path, *[ends("crashed")] * 3)
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abc", JobStatus.DONE)
    assert [len(call.order.members) for call in bench.runner.calls] == [2, 2, 2, 0, 0, 0]


def test_no_memory_under_any_of_the_groups_options_parts_it(tmp_path):
    together = (group("b", "c"), group("b", "c", recompute="full"))
    bench = bench_of(tmp_path, ends("out_of_memory"), ends("out_of_memory"), together=together)
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abc", JobStatus.DONE)
    assert [call.order.config.get("recompute") for call in bench.runner.calls] == ["none", "full", None, None, None]


def test_a_fellow_that_is_cancelled_leaves_and_the_gang_goes_on(tmp_path):
    def act(call, runner):
        bench.executor.cancel(["b"], message="by hand")
        left = JobResult(status="left", step=2)
        return all_done(call, runner, b=left)

    bench = bench_of(tmp_path, act)
    assert bench.run()
    assert bench.told_gangs == [leave_command("b")]
    assert bench.statuses == {"a": JobStatus.DONE, "b": JobStatus.CANCELLED, "c": JobStatus.DONE}
    assert bench.journal.jobs()["b"].step == 2


def test_a_fellow_that_was_paused_goes_on_alone_once_its_gang_has_let_it_go(tmp_path):
    def act(call, runner):
        bench.executor.pause(["b"])
        assert bench.statuses["b"] == JobStatus.PAUSED
        bench.executor.resume(["b"])
        assert len(bench.runner.calls) == 1, "two gangs must not train one job"
        runner.steps["b"] = 2
        left = JobResult(status="left", step=2)
        call.on_event(JobOfGroupEnded(job="b", outcome=left))
        return all_done(call, runner, b=left)

    bench = bench_of(tmp_path, act)
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abc", JobStatus.DONE)
    assert [c.order.job.name for c in bench.runner.calls] == ["a", "b"]


def test_a_leader_that_is_cancelled_stops_its_gang_and_the_others_go_on(tmp_path):
    def act(call, runner):
        bench.executor.cancel(["a"], message="by hand")
        runner.steps |= {"a": 2, "b": 2, "c": 2}
        return stopped_at(2, "bc")

    bench = bench_of(tmp_path, act)
    assert bench.run()
    assert STOP in bench.told_gangs
    assert bench.statuses == {"a": JobStatus.CANCELLED, "b": JobStatus.DONE, "c": JobStatus.DONE}


def test_fellows_with_fewer_steps_are_trained_to_their_own_end(tmp_path):
    jobs = [job("a", num_steps=10), job("b", num_steps=4)]
    together = (replace(group("b"), members=(GroupMemberProfile(job="b", num_steps=4, step_s=0.5),)),)
    bench = GroupBench(tmp_path, jobs, runner=FakeRunner(script={"a": [all_done]}), together=together)
    assert bench.run()
    assert bench.runner.calls[0].order.members[0].last_step == 4
    assert bench.plans[0].jobs[0].options[0].runtime_s == pytest.approx(10 * 1.0 + 4 * 0.5)


def test_a_group_that_has_parted_stays_so_in_the_next_process(tmp_path):
    bench = bench_of(tmp_path, *[ends("crashed")] * 3)
    stop = bench.executor.stop_starting
    bench.runner.script["b"] = [lambda call, runner: (stop(), ends("crashed")(call, runner))[1]]
    bench.run()
    bench.journal.close()
    again = GroupBench(tmp_path, bench.jobs, runner=FakeRunner(steps=bench.runner.steps))
    assert again.run()
    assert all(not call.order.members for call in again.runner.calls)
    assert again.statuses == dict.fromkeys("abc", JobStatus.DONE)


def test_a_group_that_was_interrupted_goes_on_as_a_group(tmp_path):
    def act(call, runner):
        bench.executor.stop_starting()
        runner.steps |= {"a": 5, "b": 5, "c": 5}
        return stopped_at(5, "bc")

    bench = bench_of(tmp_path, act)
    assert not bench.run()
    bench.journal.close()
    again = GroupBench(tmp_path, bench.jobs, runner=FakeRunner(steps=bench.runner.steps, script={"a": [all_done]}))
    assert again.run()
    assert [len(call.order.members) for call in again.runner.calls] == [2]
    assert again.plans[0].jobs[0].options[0].runtime_s == pytest.approx(5 * 2.0)


def test_a_single_profile_is_what_a_job_has_that_leads_nobody(tmp_path):
    bench = Bench(tmp_path, [job("a")], profiles={"a": (profile(),)})
    assert bench.run()
    assert bench.plans[0].jobs[0].members == ()


class TwoRequests:
    """A scheduler that stops the lead once all rest at a rung, and lets the others train on in a later request."""

    PURPOSE = "the scheduler of a test"

    def __init__(self):
        self._open, self._is_steered = {"a", "b", "c"}, False

    def attach(self, act, *, later, elapsed_s):
        self._act, self._later = act, later

    def listen(self, event):
        if isinstance(event, JobEnded):
            self._open.discard(event.job)
        if isinstance(event, SegmentEnded) and not self._is_steered:
            self._is_steered = True
            for request in (SteeringRequest(stops={"a": "it is weak"}), SteeringRequest(goals={"b": 10, "c": 10})):
                self._later(lambda request=request: self._act(request))

    def is_open(self):
        return bool(self._open)


def test_the_others_continue_together_where_the_lead_was_stopped_while_all_of_them_rested(tmp_path):
    def to_the_rung(call, runner):
        own, *others = [outcome_of(call, runner, order, step=4) for order in (call.order, *call.order.members)]
        members = dict(zip("bc", others, strict=True))
        return Outcome(status="done", result=replace(own, first_step=0, members=members))

    bench = bench_of(tmp_path, to_the_rung, steering=TwoRequests(), num_devices=1)
    for name in "abc":
        bench.journal.write_job(name, goal=4)
    bench.runner.script["b"] = [all_done]
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.STOPPED, "b": JobStatus.DONE, "c": JobStatus.DONE}
    assert [order.job.name for order in bench.runner.calls[1].order.members] == ["c"]
