"""Groups whose jobs take turns on one gang, so that some jobs wait."""

from dataclasses import replace
from functools import partial

import pytest

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.progress import PlanProgress, RunningSegment
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.processes.gang_events import CheckpointSaved, JobReady, JobResult, Outcome, Steps
from tests.unit.execution.fakes import FakeRunner, in_a_row, job
from tests.unit.execution.groups.grouped import GroupBench, all_done, bench_of, group, outcome_of


def test_of_those_that_take_turns_a_segment_trains_whose_turn_comes(tmp_path):
    """Two jobs run at a time, in two segments of 5 steps. b takes 4 steps, then c 4; d starts in the second segment."""
    jobs = [job("a", num_steps=10), *(job(name, num_steps=4) for name in "bcd")]
    plan, runner = partial(in_a_row, num_parts=2), FakeRunner(script={"a": [all_done, all_done]})
    bench = GroupBench(tmp_path, jobs, together=(group(*"bcd", num_steps=4, at_once=2),), make_plan=plan, runner=runner)
    assert bench.run()
    ordered = [
        {order.job.name: order.last_step for order in (call.order, *call.order.members)} for call in runner.calls
    ]
    assert ordered == [{"a": 5, "b": 4, "c": 1}, {"a": 10, "c": 4, "d": 4}]
    assert bench.plans[0].jobs[0].options[0].runtime_s == pytest.approx(12 * 1.0 + 3 * 4 * 0.5)
    assert bench.statuses == dict.fromkeys("abcd", JobStatus.DONE)


def test_those_that_wait_when_the_leader_is_through_and_the_gang_stops_go_on_by_themselves(tmp_path):
    def act(call, runner):
        runner.steps |= {"b": 4}
        theirs = {name: JobResult(status="preempted", step=step) for name, step in (("b", 4), ("c", 0))}
        return Outcome(status="done", result=replace(outcome_of(call, runner, call.order), members=theirs))

    bench = bench_of(tmp_path, act, together=(group("b", "c", at_once=2),))
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abc", JobStatus.DONE)
    assert [(call.order.job.name, len(call.order.members)) for call in bench.runner.calls[:1]] == [("a", 2)]
    assert sorted(bench.runner.names()[1:]) == ["b", "c"]
    assert bench.journal.segments("b")[1].spec.first_step == 4


def running_in_turns(at_once):
    profile = group("b", "c", **({"at_once": at_once} if at_once else {}))
    segment = PlannedSegment(job="a", option=0, last_step=6, devices=(("n", 0),), start_s=0.0, end_s=1.0)
    running = RunningSegment(segment, profile, ("n:cpu:0",), 2, ordered_step=6, step=2, first_steps={"b": 1, "c": 0})
    running.handle_event(Steps(first_step=2, seconds=(0.1, 0.1, 0.1)))
    return running


def test_those_that_take_turns_do_not_keep_step():
    together, in_turns = running_in_turns(None), running_in_turns(2)
    assert [together.step_of(name) for name in "bc"] == [4, 3]
    in_turns.handle_member_event("b", JobReady(step=1))
    in_turns.handle_member_event("b", Steps(first_step=1, seconds=tuple([0.1] * 3)))
    in_turns.handle_member_event("b", CheckpointSaved(step=9))
    assert [in_turns.step_of(name) for name in "bc"] == [4, 0]


@pytest.mark.parametrize(("at_once", "told"), [(None, [(0, "until 10")]), (2, [])])
def test_a_gang_whose_jobs_take_turns_is_not_told_to_go_on(at_once, told):
    """Such a gang has only the jobs of its segment: the next segment starts with all jobs that are left."""
    plan_progress = PlanProgress(totals={"a": 10}, after={})
    running = plan_progress.running[1] = running_in_turns(at_once)
    running.step = 6
    rest = replace(running.segment, last_step=10)
    plan_progress.planned = [rest]
    assert plan_progress.reconsider_ends(done_jobs=()) == told
    assert plan_progress.planned == ([] if told else [rest])
    plan_progress.planned = []
    running.segment = replace(running.segment, last_step=6)
    assert plan_progress.follow([rest]) == [] and plan_progress.planned == ([] if told else [rest])
