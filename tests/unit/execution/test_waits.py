"""Segments that wait for their time although their devices are free: jobs that begin later, and jobs that pause."""

import json
import math
from dataclasses import replace

import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.execution.dispatch import (
    PlannedSegment,
    end_of,
    hand_over,
    in_steps,
    next_wait_s,
    startable_segments,
    waits_of,
)
from ringmaster.tasks.execution.execution_events import SegmentStarted
from ringmaster.tasks.execution.plan_simulator import PlanSimulator
from ringmaster.tasks.execution.progress import LOOK_S, PlanProgress
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment
from ringmaster.techniques import registry
from tests.fake_engine import FakeEngine
from tests.unit.execution.fakes import CALM, Bench, job, profile

EPOCH_S = 1.8e9
DEAR, CHEAP = 10.0, 1.0
SINGLE = registry.dotted_path("single")
NONE = {"done_jobs": (), "after": {}}


def planned(name="a", device=0, *, last_step=10, at_s=-math.inf):
    return PlannedSegment(
        job=name, option=0, last_step=last_step, devices=(("here", device),), start_s=0, end_s=1, not_before_s=at_s
    )


def segment(name, start_s, end_s, *, work=1.0, device=0):
    return Segment(name, 0, start_s, end_s, work, 0.0, (("here", (device,)),))


def problem(*jobs, steps=((0.0, DEAR), (100.0, CHEAP)), num_devices=2, runtime_s=10.0, **options):
    rows = tuple(PlanningJob(name, (Option("single", 1, runtime_s),), **options) for name in jobs)
    nodes = (PlanningNode("here", num_devices, price_steps=steps),)
    return Problem("p", nodes, rows, switch_cost_s=0.0)


def plan(*segments):
    return Plan("p", segments, objective="cost")


def test_what_starts_later_than_it_could_waits_on_purpose():
    both = problem("a", "b")
    first, pause, follows, late = (
        segment("a", 0.0, 5.0, work=0.5),
        segment("a", 100.0, 105.0, work=0.5),
        segment("b", 105.0, 115.0),
        segment("b", 120.0, 130.0, device=1),
    )
    assert waits_of(plan(first, pause, follows), both) == {pause}
    assert waits_of(plan(first, pause, late), both) == {pause, late}
    after = problem("b", "a").jobs
    child = replace(both, jobs=(after[1], replace(after[0], after=("a",))))
    assert waits_of(plan(segment("a", 0.0, 10.0), segment("b", 10.0, 20.0, device=1)), child) == set()


def test_nothing_waits_where_costs_do_not_depend_on_the_time():
    late = plan(segment("a", 50.0, 60.0))
    assert waits_of(late, problem("a", steps=())) == set()
    assert waits_of(replace(late, objective="makespan"), problem("a")) == set()


def test_steps_of_a_plan_know_until_when_they_wait():
    late = segment("b", 50.0, 60.0)
    first, second = in_steps(
        plan(segment("a", 0.0, 10.0), late), num_steps={"a": 4, "b": 4}, steps_done={}, waits={late}, begins_s=EPOCH_S
    )
    assert (first.not_before_s, second.not_before_s) == (-math.inf, EPOCH_S + 50.0)
    assert next_wait_s([first, second], now_s=EPOCH_S) == EPOCH_S + 50.0
    assert next_wait_s([first, second], now_s=EPOCH_S + 50.0) == math.inf


def test_a_segment_starts_at_its_time_and_holds_back_what_follows_on_its_devices():
    waits, next_one = planned("a", at_s=50.0), planned("b")
    assert startable_segments([waits, next_one], running=(), now_s=49.0, **NONE) == []
    assert startable_segments([waits, next_one], running=(), now_s=50.0, **NONE) == [waits]
    assert startable_segments([waits, planned("b", 1)], running=(), now_s=49.0, **NONE) == [planned("b", 1)]


def test_a_gang_ends_where_its_job_pauses_and_continues_where_the_pause_is_over():
    running, later = planned(last_step=5), planned(last_step=10, at_s=50.0)
    assert end_of(running, [later], running=[running], now_s=49.0, **NONE) == "ends"
    assert end_of(running, [later], running=[running], now_s=50.0, **NONE) == later


def test_a_new_plan_that_lets_a_running_job_wait_stops_its_gang():
    running, later = planned(), planned(at_s=50.0)
    assert hand_over([later], running=[running], now_s=10.0) == ({}, [later])
    assert hand_over([later], running=[running], now_s=50.0) == ({"a": 10}, [])


def simulated(*segments, steps=10):
    both = problem("a", "b")
    return PlanSimulator(both, segments, num_steps={"a": steps, "b": steps}, step_s=lambda *_: 1.0)


def test_the_simulator_lets_time_pass_until_a_segment_has_waited():
    ahead = simulated(planned("a", last_step=5), planned("a", at_s=50.0), planned("b", 1, at_s=20.0))
    assert ahead.finish() == 55.0
    assert ahead.ended_s == {"a": 55.0, "b": 30.0}
    now = simulated(planned("a", last_step=5), planned("a", at_s=50.0))
    ahead = now.fork()
    ahead.finish()
    assert [(each.start_s, each.end_s, each.work) for each in ahead.plan_since(now).segments] == [
        (0.0, 5.0, 0.5),
        (50.0, 55.0, 0.5),
    ]


class CheapTime:
    """A planner by whose plans each job does its first half at once, and the other one when that is cheap.

    begins_s: when it becomes cheap, in seconds since the epoch.
    """

    def __init__(self, gangs, *, begins_s):
        self._gangs, self.begins_s = gangs, begins_s
        self.problems = []

    def add_terms(self, given):
        left_s = self.begins_s - EPOCH_S - self._gangs.now_s
        steps = ((0.0, DEAR), (left_s, CHEAP)) if left_s > 0 else ((0.0, CHEAP),)
        return replace(given, nodes=tuple(replace(node, price_steps=steps) for node in given.nodes))

    def plan(self, given):
        self.problems.append(given)
        cheap_s = given.nodes[0].price_steps[-1][0]
        segments = []
        for device, row in enumerate(given.jobs):
            whole_s = row.options[0].runtime_s
            is_new = whole_s > 9.0 and cheap_s > 0
            first_s = whole_s / 2 if is_new else 0.0
            if is_new:
                segments.append(segment(row.id, 0.0, first_s, work=0.5, device=device))
            segments.append(
                segment(row.id, cheap_s, cheap_s + whole_s - first_s, work=0.5 if is_new else 1.0, device=device)
            )
        return plan(*segments)


def bench(tmp_path, *, begins_s, gangs=None, policy=CALM, names=("a",)):
    gangs = gangs or FakeEngine(step_s={(name, SINGLE, 1): 1.0 for name in names}, epoch_s=EPOCH_S)
    prices = CheapTime(gangs, begins_s=begins_s)
    made = Bench(
        tmp_path,
        [job(name) for name in names],
        profiles={name: [profile()] for name in names},
        runner=gangs,
        make_plan=prices.plan,
        policy=policy,
        add_terms=prices.add_terms,
    )
    return made, prices, gangs


def starts(made):
    return [(each.segment.job, each.first_step) for each in made.told(SegmentStarted)]


def test_a_job_pauses_until_its_time_and_goes_on(tmp_path):
    made, _, gangs = bench(tmp_path, begins_s=EPOCH_S + 100.0)
    assert made.run()
    assert starts(made) == [("a", 0), ("a", 5)]
    assert gangs.now_s == 105.0 and gangs.heard == []  # its gang ended as it was ordered
    first, second = made.journal.segments()
    assert [record.outcome.step for record in (first, second)] == [5, 10]


def test_devices_that_wait_are_free_for_others(tmp_path):
    made, _, _ = bench(tmp_path, begins_s=EPOCH_S + 100.0)
    held = []
    made.runner.at(50.0, lambda: held.append(made.leases.held()))
    assert made.run()
    assert held == [{}]


def test_a_wait_survives_another_process_and_is_counted_from_then(tmp_path):
    made, prices, gangs = bench(tmp_path, begins_s=EPOCH_S + 100.0)
    gangs.at(60.0, made.executor.stop_starting)
    assert not made.run()
    again, prices, _ = bench(tmp_path, begins_s=EPOCH_S + 100.0, gangs=gangs)
    assert again.run()
    assert prices.problems[0].nodes[0].price_steps == ((0.0, DEAR), (40.0, CHEAP))
    assert starts(again) == [("a", 5)] and gangs.now_s == 105.0


def test_a_new_plan_keeps_a_wait_and_pauses_a_job_that_runs(tmp_path):
    made, prices, gangs = bench(tmp_path, begins_s=EPOCH_S + 100.0, names=("a", "b"))

    gangs.report_s = 1.0

    def learn_of_a_later_time():
        prices.begins_s = EPOCH_S + 300.0
        made.executor.replan_soon(why="prices were corrected")

    gangs.at(2.5, learn_of_a_later_time)  # both run, and have begun: they are to wait at once
    assert made.run()
    assert {(number, command) for number, command in gangs.heard} == {(1, "stop"), (2, "stop")}
    late = [record for record in made.journal.segments() if record.id > 2]
    assert len(late) == 2 and all(record.spec.first_step == 3 for record in late)
    assert gangs.now_s == 307.0


def test_a_job_that_is_added_while_others_wait_runs_at_once(tmp_path):
    made, _, gangs = bench(tmp_path, begins_s=EPOCH_S + 100.0)
    gangs.step_s["c", SINGLE, 1] = 1.0
    gangs.at(50.0, lambda: made.executor.add_jobs([made.entry(job("c"), profile())], why="c was added"))
    assert made.run()
    begun = {each.segment.job: each for each in made.told(SegmentStarted) if each.first_step == 0}
    assert set(begun) == {"a", "c"}
    assert gangs.now_s == 105.0


def test_the_stored_form_has_no_infinite_number_which_databases_refuse():
    stored = json.dumps(to_json(planned()), allow_nan=False)
    assert from_json(PlannedSegment, json.loads(stored)) == planned()


def test_a_plan_that_waits_within_its_deadline_is_followed_however_long_the_batch_has_run(tmp_path):
    """Deadlines of a problem count from when it was made; the replanner's clock from the begin of the batch."""
    gangs = FakeEngine(step_s={("a", SINGLE, 1): 1.0}, epoch_s=EPOCH_S)
    gangs.report_s = 1.0

    def add_terms(given):
        steps = ((0.0, DEAR), (max(1e-3, 200.0 - gangs.now_s), CHEAP))
        nodes = tuple(replace(node, price_steps=steps) for node in given.nodes)
        return replace(
            given, nodes=nodes, jobs=tuple(replace(row, deadline_s=270.0 - gangs.now_s) for row in given.jobs)
        )

    def make_plan(given):
        ((row,), cheap_s) = given.jobs, given.nodes[0].price_steps[-1][0]
        begins_s = cheap_s if gangs.now_s > 45.0 else 0.0
        return plan(segment(row.id, begins_s, begins_s + row.options[0].runtime_s))

    made = Bench(
        tmp_path,
        [job("a", num_steps=100)],
        profiles={"a": [profile()]},
        runner=gangs,
        make_plan=make_plan,
        policy=replace(CALM, every=0.1, objective="cost"),
        add_terms=add_terms,
    )
    assert made.run()
    assert len(starts(made)) == 2 and 240.0 < gangs.now_s < 270.0  # its second half is done when that is cheap


@pytest.mark.parametrize(("at_s", "look_s"), [(8 * 3600.0, LOOK_S), (7.0, 7.0), (-math.inf, math.inf)])
def test_the_wall_clock_is_looked_at_while_a_segment_waits_as_it_may_be_set(at_s, look_s):
    progress = PlanProgress(totals={"a": 10}, after={}, wall_clock=lambda: EPOCH_S)
    progress.planned = [planned(at_s=EPOCH_S + at_s)]
    assert progress.seconds_to_wait() == look_s
