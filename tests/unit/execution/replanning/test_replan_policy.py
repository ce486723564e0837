"""A batch that learns its step times while it runs on a simulated clock, and the re-planning policy."""

import math
from random import Random

import pytest

from ringmaster.tasks.execution.dispatch import PlannedSegment, end_of, hand_over
from ringmaster.tasks.execution.execution_events import PlanUpdate, SegmentEnded, SegmentStarted
from ringmaster.tasks.execution.plan_simulator import PlanSimulator
from ringmaster.tasks.execution.replan_policy import ReplanPolicy, ReplanTrigger, is_worth_it, remaining
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment, solve
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques import registry
from ringmaster.techniques.processes.reporter import STOP, until_command
from tests.fake_engine import FakeEngine
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import in_a_row, job, profile

OFTEN = ReplanPolicy(every=0.1, worth_s=0.0)


def by_rules(problem):
    """The best plan of the rule-based baselines."""
    return min((baseline(problem) for baseline in BASELINES), key=lambda plan: plan.makespan_s)


def true_speeds(profiles, factors):
    """The true seconds of a step: the profiled seconds times the job's factor."""
    return {
        (name, registry.dotted_path(p.technique), p.num_devices): p.step_s * factors.get(name, 1.0)
        for name, options in profiles.items()
        for p in options
    }


def bench_of(folder, profiles, factors, *, num_steps=100, make_plan=by_rules, policy=OFTEN, **options):
    jobs = [job(name, num_steps=num_steps) for name in profiles]
    gangs = FakeEngine(true_speeds(profiles, factors))
    return clocked_bench(folder, jobs, gangs, make_plan=make_plan, policy=policy, profiles=profiles, **options)


def two_options(step_s):
    return (profile("single", 1, step_s), profile("ddp", 2, 0.55 * step_s))


def test_a_batch_whose_profiles_are_right_is_not_disturbed(tmp_path):
    bench = bench_of(tmp_path, {name: two_options(1.0) for name in "abcd"}, {})
    assert bench.run()
    assert bench.statuses == dict.fromkeys("abcd", JobStatus.DONE)
    assert bench.runner.heard == []
    assert [event.why for event in bench.told(PlanUpdate)] == ["start"]


def test_work_that_waits_behind_a_slow_job_is_planned_anew_and_moves(tmp_path):
    """Four jobs are in two rows. The first takes four times its profiled time, so the third must not wait for it."""
    profiles = {name: (profile(step_s=1.0),) for name in "abcd"}
    bench = bench_of(tmp_path, profiles, {"a": 4.0}, make_plan=in_a_row)
    assert bench.run()
    assert bench.runner.now_s == pytest.approx(400.0, rel=0.02)  # not 500: c runs after b and d
    assert len(bench.told(PlanUpdate)) > 1
    assert bench.runner.heard == []  # running segments continue
    plans = bench.journal.plans()
    assert len(plans) == len(bench.told(PlanUpdate))
    assert Plan.from_json(plans[-1]["plan"]).segments


def test_a_job_that_must_move_is_stopped_at_a_checkpoint_and_goes_on_elsewhere(tmp_path):
    """The other jobs end early and leave a device idle. The last job stops, and continues on both devices."""
    profiles = {"long": two_options(4.0), "b": (profile(step_s=4.0),), "c": (profile(step_s=4.0),)}
    bench = bench_of(tmp_path, profiles, {"b": 0.1, "c": 0.1, "long": 2.0}, make_plan=rows_then_rules())
    assert bench.run()
    stopped = [event for event in bench.told(SegmentEnded) if event.outcome.status == "preempted"]
    assert [event.segment.job for event in stopped] == ["long"]
    assert [command for _, command in bench.runner.heard] == [STOP]
    wide = [event for event in bench.told(SegmentStarted) if event.technique == "ddp"]
    assert [event.segment.job for event in wide] == ["long"]
    assert wide[0].first_step == stopped[0].outcome.result.step > 0
    assert bench.runner.now_s < 0.8 * 800  # one device would take 800 s


def rows_then_rules():
    """A planner that makes the first plan in the order of the jobs, and later plans by the baselines."""
    made = []

    def make_plan(problem):
        made.append(problem)
        return in_a_row(problem) if len(made) == 1 else by_rules(problem)

    return make_plan


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_every_step_is_trained_once_whatever_is_planned_on_the_way(tmp_path, seed):
    draw = Random(seed)
    names = [f"j{i}" for i in range(6)]
    profiles = {name: two_options(draw.uniform(0.5, 3.0)) for name in names}
    factors = {name: max(0.3, draw.gauss(1.0, 0.5)) for name in names}
    policy = ReplanPolicy(every=0.05, surprise=0.01, worth=0.0, per_switch=0.0, worth_s=0.0)
    bench = bench_of(tmp_path, profiles, factors, num_devices=3, policy=policy)
    assert bench.run()
    assert set(bench.statuses.values()) == {JobStatus.DONE}
    for name in names:
        told = [e for e in bench.told(SegmentEnded) if e.segment.job == name]
        reached = [0, *(e.outcome.result.step for e in told)]
        assert reached == sorted(reached)
        assert reached[-1] == 100
        assert [e.first_step for e in bench.told(SegmentStarted) if e.segment.job == name] == reached[:-1]
    assert bench.leases.held() == {}


def test_a_segment_goes_on_while_nobody_waits_for_its_devices(tmp_path):
    """The plan moves `a` to device 1 when `b` ends there. `b` is late, so `a` continues on its device until then."""

    def plan(problem):
        parts = [("a", 0, 50, 0.5, 0), ("b", 0, 50, 1.0, 1), ("a", 50, 100, 0.5, 1)]
        segments = (Segment(j, 0, float(s), float(e), w, 0.0, (("here", (d,)),)) for j, s, e, w, d in parts)
        return Plan(problem.name, tuple(segments))

    profiles = {"a": (profile(step_s=1.0),), "b": (profile(step_s=0.5),)}
    never = ReplanPolicy(every=10.0, surprise=math.inf)
    bench = bench_of(tmp_path, profiles, {"b": 1.5}, make_plan=plan, policy=never)
    bench.runner.report_s = 0.5
    assert bench.run()
    first, *_ = [e for e in bench.told(SegmentEnded) if e.segment.job == "a"]
    assert until_command(100) in [command for _, command in bench.runner.heard]
    assert first.outcome.result.step >= 75
    assert bench.runner.now_s == pytest.approx(100.0, abs=6.0)


def at_length(problem):
    """The plan of a full search: the time limit is generous, so that a slow machine finds the same plan."""
    return solve(problem, time_limit_s=3600.0)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_wrong_profiles_cost_three_per_cent_at_most(tmp_path, seed):
    names, draw = [f"j{i}" for i in range(12)], Random(seed)
    profiles = {name: tuple(ladder(draw)) for name in names}
    factors = {name: max(0.1, draw.gauss(1.0, 0.25)) for name in names}
    bench = bench_of(tmp_path, profiles, factors, num_steps=1000, make_plan=at_length, num_devices=8, policy=OFTEN)
    assert bench.run()
    right = {name: [(p, factors[name]) for p in options] for name, options in profiles.items()}
    jobs = tuple(
        PlanningJob(name, tuple(Option(p.technique, p.num_devices, 1000 * p.step_s * f) for p, f in rows))
        for name, rows in right.items()
    )
    ideal_s = at_length(Problem("right", (PlanningNode("here", 8),), jobs, switch_cost_s=0.1)).makespan_s
    assert bench.runner.now_s <= 1.03 * ideal_s


def ladder(draw):
    step_s, scales = draw.uniform(1.0, 12.0), draw.uniform(0.5, 0.95)
    for num_devices in (1, 2, 4, 8):
        name = "single" if num_devices == 1 else "ddp"
        yield profile(name, num_devices, step_s / num_devices**scales)


# -- the policy ------------------------------------------------------------------------------------------------------


def test_the_rest_is_planned_on_a_clock_and_at_surprises():
    when = ReplanTrigger(ReplanPolicy(every=0.1, least=0.02, surprise=0.05))
    when.planned(0.0, {"a": 1000.0, "b": 600.0})
    assert when.why_now(99.0, {"a": 1000.0, "b": 600.0}) is None
    assert when.why_now(100.0, {"a": 1000.0, "b": 600.0}) == "the speeds measured since the last plan"
    assert when.why_now(50.0, {"a": 1000.0, "b": 700.0}) == "b is late by 100 s"
    assert when.why_now(50.0, {"a": 900.0, "b": 600.0}) == "a is early by 100 s"
    when.planned(950.0, {"a": 1000.0})
    assert when.next_s == 970.0  # a tenth of the remaining time would be 5 s; the minimum is a fiftieth of the total


def test_devices_that_are_out_are_planned_around():
    options = (Option("single", 1, 10.0), Option("ddp", 2, 6.0), Option("fsdp", 4, 4.0))
    problem = Problem("p", (PlanningNode("n", 4),), (PlanningJob("a", options), PlanningJob("b", options[:1])))
    on = planned("b", 3)
    rest = remaining(problem, running={"b": on}, started=["a"], out=[("n", 0), ("n", 2)])
    assert [len(job.options) for job in rest.problem.jobs] == [2, 1]
    assert rest.problem.job("b").running.devices == (("n", (1,)),)
    assert rest.problem.job("a").started
    plan = rest.real(solve(rest.problem))
    assert {d for s in plan.segments for _, ids in s.devices for d in ids} <= {1, 3}
    assert remaining(problem, running={}, started=[], out=[("n", i) for i in range(4)]) is None


def planned(name, *devices, at=0.0, last_step=1, option=0):
    gang = tuple(("n", d) for d in devices)
    return PlannedSegment(job=name, option=option, last_step=last_step, devices=gang, start_s=at, end_s=at + 1)


def test_a_new_plan_leaves_alone_what_it_begins_with():
    running = [planned("a", 0, last_step=5), planned("b", 1, 2, last_step=5)]
    fresh = [planned("c", 1), planned("a", 0, last_step=9), planned("b", 1, 2, at=1.0, last_step=9)]
    stays, left = hand_over(fresh, running=running)
    assert stays == {"a": 9}
    assert [segment.job for segment in left] == ["c", "b"]


def test_at_its_end_a_segment_gives_way_joins_or_goes_on():
    a, rules = planned("a", 0), {"done_jobs": (), "after": {}}
    assert end_of(a, [planned("b", 0), planned("a", 1)], running=[a], **rules) == "ends"
    assert end_of(a, [planned("a", 0, last_step=9)], running=[a], **rules) == planned("a", 0, last_step=9)
    assert end_of(a, [planned("a", 1), planned("b", 0)], running=[a, planned("x", 1)], **rules) == "ends"
    assert end_of(a, [planned("a", 1)], running=[a, planned("x", 1)], **rules) == "continues"
    waits = {"done_jobs": (), "after": {"b": ("x",)}}
    assert end_of(a, [planned("b", 0), planned("a", 1)], running=[a, planned("x", 1)], **waits) == "continues"


def test_two_that_go_on_beyond_their_end_both_make_way_for_what_needs_the_devices_of_both():
    a, b = planned("a", 0), planned("b", 1)
    waiting = [planned("wide", 0, 1), planned("a", 2), planned("b", 2)]
    rules = {"running": [a, b, planned("x", 2)], "done_jobs": (), "after": {}}
    assert end_of(a, waiting, **rules) == "continues"
    assert end_of(b, waiting, over={"a"}, **rules) == "ends"
    assert end_of(a, waiting, over={"a", "b"}, **rules) == "ends"


def test_a_deadline_that_is_in_danger_is_a_reason_once():
    when = ReplanTrigger(ReplanPolicy(surprise=10.0))
    when.planned(0.0, {"a": 100.0})
    danger = "in danger of missing their deadlines: a by 10 s"
    assert when.why_now(5.0, {"a": 100.0}, deadlines_s={"a": 110.0}) is None
    assert when.why_now(6.0, {"a": 120.0}, deadlines_s={"a": 110.0}) == danger
    assert when.why_now(7.0, {"a": 121.0}, deadlines_s={"a": 110.0}) is None
    assert when.why_now(8.0, {"a": 100.0}, deadlines_s={"a": 110.0}) is None
    assert when.why_now(9.0, {"a": 120.0}, deadlines_s={"a": 110.0}) == danger


def in_order(*rows, **options):
    """A simulation of a job of 10 s and one of 1 s on three devices, by rows of (job, device, start, end)."""
    runtimes_s = {"long": 10.0, "short": 1.0}
    jobs = tuple(PlanningJob(name, (Option("single", 1, seconds),)) for name, seconds in runtimes_s.items())
    planned = [
        PlannedSegment(job=name, option=0, last_step=10, devices=(("n", device),), start_s=start_s, end_s=end_s)
        for name, device, start_s, end_s in rows
    ]
    steps = dict.fromkeys(("long", "short"), 10)
    problem = Problem("two", (PlanningNode("n", 3),), jobs, switch_cost_s=1.0)
    return PlanSimulator(problem, planned, num_steps=steps, step_s=lambda name, _: runtimes_s[name] / 10, **options)


LONG_FIRST = (("long", 0, 0.0, 10.0), ("short", 0, 10.0, 11.0))
SHORT_FIRST = (("short", 0, 0.0, 1.0), ("long", 0, 1.0, 11.0))


@pytest.mark.parametrize(("objective", "is_better"), [("makespan", False), ("weighted", True), ("cost", False)])
def test_plans_are_compared_by_the_objective(objective, is_better):
    fresh = in_order(*SHORT_FIRST).planned
    assert is_worth_it(in_order(*LONG_FIRST), fresh, policy=ReplanPolicy(objective=objective)) is is_better


@pytest.mark.parametrize(("objective", "is_better"), [("makespan", False), ("cost", True)])
def test_a_plan_that_costs_less_is_better_although_it_ends_later(objective, is_better):
    """Under "wide" the job holds three devices for 6 s, alone one device for 10 s."""
    options = (Option("single", 1, 10.0), Option("wide", 3, 6.0))
    problem = Problem("one", (PlanningNode("n", 3, price=1.0),), (PlanningJob("j", options),))

    def simulated(option, *devices):
        gang = tuple(("n", device) for device in devices)
        end_s = options[option].runtime_s
        planned = [PlannedSegment(job="j", option=option, last_step=10, devices=gang, start_s=0.0, end_s=end_s)]
        step_s = {0: 1.0, 1: 0.6}
        return PlanSimulator(problem, planned, num_steps={"j": 10}, step_s=lambda _, option: step_s[option])

    narrow, wide = simulated(0, 0), simulated(1, 0, 1, 2)
    policy = ReplanPolicy(objective=objective)
    assert is_worth_it(wide, narrow.planned, policy=policy) is is_better
    assert is_worth_it(narrow, wide.planned, policy=policy) is not is_better


def test_a_device_that_comes_back_after_the_last_end_hides_no_gain():
    fresh = in_order(("long", 0, 0.0, 10.0), ("short", 1, 0.0, 1.0)).planned
    assert is_worth_it(in_order(*LONG_FIRST, out={("n", 2): 1000.0}), fresh, policy=ReplanPolicy())
