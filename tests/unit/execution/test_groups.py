"""Jobs that one gang trains together: each has its own record, and goes on by itself where the group cannot."""

from dataclasses import replace
from functools import partial

import pytest

from tasks.execution.course import Course
from tasks.execution.dispatch import PlannedSegment
from tasks.execution.events import JobEnded, SegmentEnded, SegmentStarted
from tasks.execution.journal import CANCELLED, DONE, FAILED, PAUSED
from tasks.execution.progress import RunningSegment
from tasks.execution.roster import Enlisted
from techniques import Profile, registry
from techniques.engine.gang import Outcome
from techniques.engine.reporter import STOP, leave
from techniques.profiles import Fellow
from tests.unit.execution.fakes import Bench, FakeRunner, ends, in_a_row, job, profile

SHARED = registry.dotted_path("shared_base")


def group(*fellows, num_steps=10, num_devices=1, **config):
    """What a group can run under; one more job makes a step half a second longer."""
    return Profile(
        technique="shared_base",
        config={"recompute": "none", **config},
        num_devices=num_devices,
        num_ranks=num_devices,
        step_s=1.0,
        peak_bytes=1,
        fellows=tuple(Fellow(job=name, num_steps=num_steps, step_s=0.5) for name in fellows),
    )


class GroupBench(Bench):
    """A batch whose first job leads the others; what its gangs are told is in `told_gangs`."""

    def __init__(self, folder, jobs, *, together=None, **options):
        self._together = together or (group(*(each.name for each in jobs[1:])),)
        super().__init__(folder, jobs, **options)
        self.told_gangs = []
        self.executor._steer = lambda folder, command: self.told_gangs.append(command)

    def entry(self, job, *profiles):
        together = self._together if job.name == self.jobs[0].name else ()
        return Enlisted(job=job, profiles=profiles, place=self.place, together=together)


def outcome_of(call, runner, order, *, step=None, **said):
    name = order.job.name
    runner.steps[name] = step = max(order.last_step if step is None else step, runner.steps.get(name, 0))
    metrics = {"metrics": {"loss": 1.0}} if step == order.job.total_steps else {}
    return {"status": "done", "step": step, **metrics, **said}


def all_done(call, runner, **fellows):
    """A gang that comes to its end; fellows: what is said of some of them instead."""
    mine = outcome_of(call, runner, call.order)
    theirs = {
        order.job.name: fellows.get(order.job.name) or outcome_of(call, runner, order) for order in call.order.fellows
    }
    return Outcome(status="done", result={**mine, "first_step": 0, "fellows": theirs})


def bench_of(folder, *acts, names="abc", num_steps=10, **options):
    runner = FakeRunner(script={names[0]: list(acts)})
    return GroupBench(folder, [job(name, num_steps=num_steps) for name in names], runner=runner, **options)


def test_one_gang_trains_all_and_each_has_its_own_end(tmp_path):
    bench = bench_of(tmp_path, all_done)
    assert bench.run()
    (call,) = bench.runner.calls
    assert call.order.technique == SHARED
    assert [(o.job.name, o.last_step, o.technique) for o in call.order.fellows] == [
        ("b", 10, SHARED),
        ("c", 10, SHARED),
    ]
    assert len({o.checkpoint_dir for o in (call.order, *call.order.fellows)}) == 3
    assert bench.statuses == dict.fromkeys("abc", DONE)
    assert sorted(event.job for event in bench.told(JobEnded)) == ["a", "b", "c"]
    assert bench.told(SegmentStarted)[0].fellows == bench.told(SegmentEnded)[0].fellows == ("b", "c")
    assert all(bench.journal.jobs()[name].details["metrics"] == {"loss": 1.0} for name in "abc")


def test_the_planner_sees_one_job_that_takes_as_long_as_all_of_them(tmp_path):
    bench = bench_of(tmp_path, all_done)
    bench.run()
    (row,) = bench.plans[0].jobs
    assert (row.id, row.fellows) == ("a", ("b", "c"))
    assert row.options[0].runtime_s == pytest.approx(10 * (1.0 + 0.5 + 0.5))


def test_a_segment_is_told_as_each_jobs_own(tmp_path):
    bench = bench_of(tmp_path, all_done)
    bench.run()
    for name in "abc":
        (segment,) = bench.journal.segments(name)
        assert (segment.job, segment.what["technique"]) == (name, "shared_base")
        assert (segment.outcome["status"], segment.outcome["step"]) == ("done", 10)
    assert len(bench.journal.segments()) == 1


def test_a_fellow_that_is_through_is_done_while_the_gang_goes_on(tmp_path):
    seen = []

    def act(call, runner):
        order = call.order.fellows[0]
        call.on_event({"event": "ended", "job": "b", "outcome": outcome_of(call, runner, order)})
        return Outcome(status="preempted", result={"step": 5, "fellows": {"c": {"status": "preempted", "step": 5}}})

    def second(call, runner):
        seen.append(([o.job.name for o in call.order.fellows], bench.statuses["b"]))
        return all_done(call, runner)

    bench = bench_of(tmp_path, act, second)
    assert bench.run()
    assert seen == [(["c"], DONE)]
    assert [e.job for e in bench.told(JobEnded)].count("b") == 1


def test_what_a_fellow_checkpoints_is_its_own_step(tmp_path):
    def act(call, runner):
        call.on_event({"event": "checkpoint", "job": "b", "step": 4, "seconds": 0.1})
        call.on_event({"event": "checkpoint", "job": "a", "step": 3, "seconds": 0.1})
        return Outcome(status="crashed", message="as it should")

    bench = bench_of(tmp_path, act, all_done)
    assert bench.run()
    assert bench.journal.segments("b")[1].what["first_step"] == 4
    assert bench.journal.segments("a")[1].what["first_step"] == 3


def test_an_invalid_fellow_fails_alone(tmp_path):
    broken = {"status": "invalid", "step": 3, "message": "the loss became nan"}
    bench = bench_of(tmp_path, lambda call, runner: all_done(call, runner, b=broken))
    assert bench.run()
    assert bench.statuses == {"a": DONE, "b": FAILED, "c": DONE}
    assert bench.journal.jobs()["b"].message == "the loss became nan"


def test_where_the_leader_fails_the_others_go_on_by_themselves(tmp_path):
    def act(call, runner):
        runner.steps |= {"b": 3, "c": 3}
        theirs = {name: {"status": "preempted", "step": 3} for name in "bc"}
        return Outcome(status="invalid", message="the loss became nan", result={"step": 3, "fellows": theirs})

    bench = bench_of(tmp_path, act)
    assert bench.run()
    assert bench.statuses == {"a": FAILED, "b": DONE, "c": DONE}
    assert sorted(bench.runner.names()) == ["a", "b", "c"]
    assert all(not call.order.fellows for call in bench.runner.calls[1:])
    assert {call.order.technique for call in bench.runner.calls[1:]} == {registry.dotted_path("single")}


def test_a_gang_that_keeps_crashing_parts(tmp_path):
    bench = bench_of(tmp_path, *[ends("crashed")] * 3)
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abc", DONE)
    assert [len(call.order.fellows) for call in bench.runner.calls] == [2, 2, 2, 0, 0, 0]


def test_no_memory_under_any_of_the_groups_options_parts_it(tmp_path):
    together = (group("b", "c"), group("b", "c", recompute="full"))
    bench = bench_of(tmp_path, ends("out_of_memory"), ends("out_of_memory"), together=together)
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abc", DONE)
    assert [call.order.config.get("recompute") for call in bench.runner.calls] == ["none", "full", None, None, None]


def test_a_fellow_that_is_cancelled_leaves_and_the_gang_goes_on(tmp_path):
    def act(call, runner):
        bench.executor.cancel(["b"], message="by hand")
        left = {"status": "left", "step": 2}
        return all_done(call, runner, b=left)

    bench = bench_of(tmp_path, act)
    assert bench.run()
    assert bench.told_gangs == [leave("b")]
    assert bench.statuses == {"a": DONE, "b": CANCELLED, "c": DONE}
    assert bench.journal.jobs()["b"].step == 2


def test_a_fellow_that_was_paused_goes_on_alone_once_its_gang_has_let_it_go(tmp_path):
    def act(call, runner):
        bench.executor.pause(["b"])
        assert bench.statuses["b"] == PAUSED
        bench.executor.resume(["b"])
        assert len(bench.runner.calls) == 1, "two gangs must not train one job"
        runner.steps["b"] = 2
        call.on_event({"event": "ended", "job": "b", "outcome": {"status": "left", "step": 2}})
        return all_done(call, runner, b={"status": "left", "step": 2})

    bench = bench_of(tmp_path, act)
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abc", DONE)
    assert [c.order.job.name for c in bench.runner.calls] == ["a", "b"]


def test_a_leader_that_is_cancelled_stops_its_gang_and_the_others_go_on(tmp_path):
    def act(call, runner):
        bench.executor.cancel(["a"], message="by hand")
        runner.steps |= {"a": 2, "b": 2, "c": 2}
        theirs = {name: {"status": "preempted", "step": 2} for name in "bc"}
        return Outcome(status="preempted", result={"step": 2, "fellows": theirs})

    bench = bench_of(tmp_path, act)
    assert bench.run()
    assert STOP in bench.told_gangs
    assert bench.statuses == {"a": CANCELLED, "b": DONE, "c": DONE}


def test_fellows_with_fewer_steps_are_trained_to_their_own_end(tmp_path):
    jobs = [job("a", num_steps=10), job("b", num_steps=4)]
    together = (replace(group("b"), fellows=(Fellow(job="b", num_steps=4, step_s=0.5),)),)
    bench = GroupBench(tmp_path, jobs, runner=FakeRunner(script={"a": [all_done]}), together=together)
    assert bench.run()
    assert bench.runner.calls[0].order.fellows[0].last_step == 4
    assert bench.plans[0].jobs[0].options[0].runtime_s == pytest.approx(10 * 1.0 + 4 * 0.5)


def test_of_those_that_take_turns_a_segment_trains_whose_turn_comes(tmp_path):
    """Two at a time, the leader's 10 steps in two halves: b takes 4 of them, c the next 4, d begins in the second."""
    jobs = [job("a", num_steps=10), *(job(name, num_steps=4) for name in "bcd")]
    plan, runner = partial(in_a_row, num_parts=2), FakeRunner(script={"a": [all_done, all_done]})
    bench = GroupBench(tmp_path, jobs, together=(group(*"bcd", num_steps=4, at_once=2),), make_plan=plan, runner=runner)
    bench.executor._forethought.replanner = None
    assert bench.run()
    ordered = [
        {order.job.name: order.last_step for order in (call.order, *call.order.fellows)} for call in runner.calls
    ]
    assert ordered == [{"a": 5, "b": 4, "c": 1}, {"a": 10, "c": 4, "d": 4}]
    assert bench.plans[0].jobs[0].options[0].runtime_s == pytest.approx(12 * 1.0 + 3 * 4 * 0.5)
    assert bench.statuses == dict.fromkeys("abcd", DONE)


def test_those_that_wait_when_the_leader_is_through_and_the_gang_stops_go_on_by_themselves(tmp_path):
    def act(call, runner):
        runner.steps |= {"b": 4}
        theirs = {"b": {"status": "preempted", "step": 4}, "c": {"status": "preempted", "step": 0}}
        return Outcome(status="done", result={**outcome_of(call, runner, call.order), "fellows": theirs})

    bench = bench_of(tmp_path, act, together=(group("b", "c", at_once=2),))
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abc", DONE)
    assert [(call.order.job.name, len(call.order.fellows)) for call in bench.runner.calls[:1]] == [("a", 2)]
    assert sorted(bench.runner.names()[1:]) == ["b", "c"]
    assert bench.journal.segments("b")[1].what["first_step"] == 4


def running_in_turns(at_once):
    profile = group("b", "c", **({"at_once": at_once} if at_once else {}))
    segment = PlannedSegment(job="a", option=0, last_step=6, devices=(("n", 0),), start_s=0.0, end_s=1.0)
    running = RunningSegment(segment, profile, ("n:cpu:0",), 2, ordered_step=6, step=2, beside={"b": 1, "c": 0})
    running.hear({"event": "steps", "first_step": 2, "seconds": [0.1, 0.1, 0.1]})
    return running


def test_those_that_take_turns_do_not_keep_step():
    together, in_turns = running_in_turns(None), running_in_turns(2)
    assert [together.step_of(name) for name in "bc"] == [4, 3]
    in_turns.hear_of("b", {"event": "ready", "step": 1})
    in_turns.hear_of("b", {"event": "steps", "first_step": 1, "seconds": [0.1] * 3})
    in_turns.hear_of("b", {"event": "checkpoint", "step": 9})
    assert [in_turns.step_of(name) for name in "bc"] == [4, 0]


@pytest.mark.parametrize(("at_once", "told"), [(None, [("", "until 10")]), (2, [])])
def test_a_gang_whose_jobs_take_turns_is_not_told_to_go_on(at_once, told):
    """It has none but the jobs of its segment: the next one begins with all that are left."""
    course = Course(totals={"a": 10}, after={})
    running = course.running[1] = running_in_turns(at_once)
    running.step = 6
    rest = replace(running.segment, last_step=10)
    course.planned = [rest]
    assert course.reconsider_ends(done_jobs=()) == told
    assert course.planned == ([] if told else [rest])
    course.planned = []
    running.segment = replace(running.segment, last_step=6)
    assert course.follow([rest]) == [] and course.planned == ([] if told else [rest])


def test_a_group_that_has_parted_stays_so_in_the_next_process(tmp_path):
    bench = bench_of(tmp_path, *[ends("crashed")] * 3)
    stop = bench.executor.stop
    bench.runner.script["b"] = [lambda call, runner: (stop(), ends("crashed")(call, runner))[1]]
    bench.run()
    bench.journal.close()
    again = GroupBench(tmp_path, bench.jobs, runner=FakeRunner(steps=bench.runner.steps))
    assert again.run()
    assert all(not call.order.fellows for call in again.runner.calls)
    assert again.statuses == dict.fromkeys("abc", DONE)


def test_a_group_that_was_interrupted_goes_on_as_a_group(tmp_path):
    def act(call, runner):
        bench.executor.stop()
        runner.steps |= {"a": 5, "b": 5, "c": 5}
        theirs = {name: {"status": "preempted", "step": 5} for name in "bc"}
        return Outcome(status="preempted", result={"step": 5, "fellows": theirs})

    bench = bench_of(tmp_path, act)
    assert not bench.run()
    bench.journal.close()
    again = GroupBench(tmp_path, bench.jobs, runner=FakeRunner(steps=bench.runner.steps, script={"a": [all_done]}))
    assert again.run()
    assert [len(call.order.fellows) for call in again.runner.calls] == [2]
    assert again.plans[0].jobs[0].options[0].runtime_s == pytest.approx(5 * 2.0)


OVER_TWO = group("b", "c", num_devices=2, base="sharded")


def test_a_group_over_two_devices_is_one_gang_that_has_both(tmp_path):
    held = []

    def act(call, runner):
        held.append(set(bench.leases.held()))
        return all_done(call, runner)

    bench = bench_of(tmp_path, act, together=(OVER_TWO,))
    assert bench.run()
    (call,) = bench.runner.calls
    assert (call.num_ranks, call.order.config["base"]) == (2, "sharded")
    assert [len(order.slots) for order in (call.order, *call.order.fellows)] == [2, 2, 2]
    assert held == [{"here:cpu:0", "here:cpu:1"}]
    assert bench.leases.held() == {}
    assert {segment.what["num_devices"] for name in "abc" for segment in bench.journal.segments(name)} == {2}
    assert bench.statuses == dict.fromkeys("abc", DONE)


def test_a_group_without_memory_on_one_device_goes_on_over_two(tmp_path):
    def act(call, runner):
        runner.steps |= dict.fromkeys("abc", 4)
        for name in "abc":
            call.on_event({"event": "checkpoint", "job": name, "step": 4, "seconds": 0.1})
        return Outcome(status="out_of_memory", message="no room")

    bench = bench_of(tmp_path, act, all_done, together=(group("b", "c"), OVER_TWO))
    assert bench.run()
    assert [(call.num_ranks, len(call.order.fellows)) for call in bench.runner.calls] == [(1, 2), (2, 2)]
    assert bench.journal.segments("b")[1].what["first_step"] == 4
    assert bench.statuses == dict.fromkeys("abc", DONE)


def test_a_group_over_two_devices_that_keeps_crashing_parts_onto_both(tmp_path):
    bench = bench_of(tmp_path, *[ends("crashed")] * 3, together=(OVER_TWO,))
    assert bench.run()
    assert [(call.num_ranks, len(call.order.fellows)) for call in bench.runner.calls] == [(2, 2)] * 3 + [(1, 0)] * 3
    assert bench.statuses == dict.fromkeys("abc", DONE)


@pytest.mark.parametrize("together", [(OVER_TWO,), (group("b", "c"), OVER_TWO)], ids=["over two", "either"])
def test_a_group_that_was_interrupted_goes_on_over_what_devices_it_may(tmp_path, together):
    def act(call, runner):
        bench.executor.stop()
        runner.steps |= dict.fromkeys("abc", 5)
        theirs = {name: {"status": "preempted", "step": 5} for name in "bc"}
        return Outcome(status="preempted", result={"step": 5, "fellows": theirs})

    bench = bench_of(tmp_path, act, together=together)
    assert not bench.run()
    bench.journal.close()
    runner = FakeRunner(steps=bench.runner.steps, script={"a": [all_done]})
    again = GroupBench(tmp_path, bench.jobs, runner=runner, together=(OVER_TWO, group("b", "c")))
    assert again.run()
    assert [(call.num_ranks, len(call.order.fellows)) for call in again.runner.calls] == [(2, 2)]
    assert {segment.what["first_step"] for segment in again.journal.segments("b")} == {0, 5}


def test_a_single_profile_is_what_a_job_has_that_leads_nobody(tmp_path):
    bench = Bench(tmp_path, [job("a")], profiles={"a": (profile(),)})
    assert bench.run()
    assert bench.plans[0].jobs[0].fellows == ()
