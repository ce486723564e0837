"""Options of jobs of about a minute: what may be faster is measured early, and what was measured is used."""

from dataclasses import replace

import pytest

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import PlanUpdate, SegmentStarted
from ringmaster.tasks.execution.replan_policy import ExploredJob, explored
from ringmaster.tasks.execution.replanner import POLICY
from ringmaster.tasks.planning import Option, solve
from ringmaster.tasks.profiling.speed_beliefs import SpeedBelief
from ringmaster.techniques import registry
from ringmaster.techniques.processes.reporter import until_command
from tests.fake_engine import FakeEngine
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import job
from tests.unit.execution.test_measured_options import predicted

UNSURE = SpeedBelief(mean=0.0, spread=0.35, own_spread=0.14)
HERE = (("here", 0), ("here", 1))
DDP, SINGLE = ("ddp", 2, 0.39), ("single", 2, 0.40)


def one_job(folder, *, single_s, ddp_s=0.40, options=(DDP, SINGLE), num_steps=138, startup_s=1.0, true_startup_s=None):
    """A job of 138 steps on two devices, as one rank of two threads or two ranks, which are predicted alike."""
    profiles = {
        "a": tuple(
            replace(predicted(f"{t} {n}", t, n, step_s), save_s=0.5, startup_s=startup_s) for t, n, step_s in options
        )
    }
    speeds = {("a", registry.dotted_path(t), 2): s for t, s in (("ddp", ddp_s), ("single", single_s), ("zero1", 0.40))}
    engine = FakeEngine(speeds, startup_s=true_startup_s or startup_s, report_s=0.2)
    bench = clocked_bench(
        folder, [job("a", num_steps=num_steps)], engine, make_plan=lambda problem: solve(problem, work_s=0.1),
        policy=POLICY, profiles=profiles,
    )  # fmt: skip
    assert bench.run()
    return bench


def segments(bench):
    return [(event.technique, event.first_step) for event in bench.told(SegmentStarted)]


@pytest.mark.parametrize(
    ("single_s", "expected"),
    [
        (0.32, [("single", 0)]),
        (0.40, [("single", 0)]),
        (0.48, [("single", 0), ("ddp", 6)]),
    ],
    ids=["faster", "as fast", "slower"],
)
def test_a_job_of_a_minute_measures_what_may_be_faster_and_goes_on_under_what_is(tmp_path, single_s, expected):
    bench = one_job(tmp_path, single_s=single_s)
    assert segments(bench) == expected
    assert [event.why for event in bench.told(PlanUpdate)] == ["start"]
    assert bench.runner.heard == ([(1, until_command(138))] if len(expected) == 1 else [])


def test_a_trial_of_long_steps_is_continued_without_a_restart(tmp_path):
    options = (("ddp", 2, 3.9), ("single", 2, 4.0))
    bench = one_job(tmp_path, single_s=3.2, ddp_s=4.0, options=options)
    (first, *later) = segments(bench)
    assert first == ("single", 0)
    assert ("single", 6) not in later
    assert bench.runner.heard[0] == (1, until_command(138))


def test_a_start_that_took_longer_than_predicted_is_what_a_switch_costs(tmp_path):
    """The first trial takes a start of 12 s where 1 s was predicted, so that no plan moves the job again."""
    bench = one_job(tmp_path, single_s=0.48, startup_s=1.0, true_startup_s=12.0)
    assert segments(bench) == [("single", 0)]


def test_the_best_of_several_that_were_measured_is_used(tmp_path):
    options = (DDP, SINGLE, ("zero1", 2, 0.40))
    bench = one_job(tmp_path, single_s=0.30, options=options, num_steps=400)
    assert segments(bench) == [("single", 0), ("zero1", 6), ("single", 12)]


def test_a_start_that_takes_longer_than_the_gain_is_not_made(tmp_path):
    assert segments(one_job(tmp_path, single_s=0.32, startup_s=8.0)) == [("ddp", 0)]


def test_what_was_never_measured_is_measured_where_the_job_comes_again():
    slow_start = ExploredJob(
        options=(Option("ddp", 2, 54.0), Option("single", 2, 62.0, startup_s=3.0)), beliefs=(UNSURE, UNSURE),
        step=0, total_steps=138,
    )  # fmt: skip
    planned = [PlannedSegment(job="a", option=0, last_step=138, devices=HERE, start_s=0.0, end_s=54.0)]
    for num_runs, expected in ((1, [0]), (8, [1, 0])):
        tried = explored(planned, {"a": slow_start}, switch_cost_s=4.0, most=8, num_runs=num_runs)
        assert [segment.option for segment in tried] == expected
