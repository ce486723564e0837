"""Short segments that try options: where they are worth their cost, and that they fit into the plan."""

import math
from dataclasses import replace
from random import Random

import pytest

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.replan_policy import ExploredJob, expected_saving, explored
from ringmaster.tasks.planning import Option
from ringmaster.tasks.profiling.speed_beliefs import SpeedBelief

UNSURE = SpeedBelief(mean=0.0, spread=0.3, own_spread=0.2)
SURE = SpeedBelief(mean=0.0, spread=0.02, own_spread=0.0)
PLANNED = PlannedSegment(job="a", option=0, last_step=10_000, devices=(("n", 0), ("n", 1)), start_s=0.0, end_s=20_000.0)
DDP, FSDP = Option("ddp", 2, 20_000.0), Option("fsdp", 2, 20_400.0)


def job_of(*options, beliefs=None, **changes):
    beliefs = beliefs or [UNSURE] * len(options)
    return ExploredJob(**{"options": options, "beliefs": beliefs, "step": 0, "total_steps": 10_000} | changes)


def tried(job, *, planned=(PLANNED,), switch_cost_s=2.0, most=8):
    return [s.option for s in explored(planned, {"a": job}, switch_cost_s=switch_cost_s, most=most)]


def test_an_option_that_may_be_faster_is_tried_first():
    segments = explored([PLANNED], {"a": job_of(DDP, FSDP)}, switch_cost_s=2.0, most=8)
    assert [(s.option, s.last_step, s.devices) for s in segments] == [
        (1, 6, PLANNED.devices),
        (0, 10_000, PLANNED.devices),
    ]


@pytest.mark.parametrize(
    "job",
    [
        job_of(DDP, FSDP, beliefs=[SURE, SURE]),
        job_of(DDP, replace(FSDP, runtime_s=200_000.0)),
        job_of(DDP, replace(FSDP, num_devices=4)),
        job_of(DDP, replace(FSDP, device_type="a100")),
        job_of(DDP, replace(FSDP, jobs=("b",))),
        job_of(DDP, FSDP, known=[1]),
        job_of(DDP, FSDP, step=9_990),
        job_of(DDP, FSDP, step=10_000, is_running=True),
    ],
    ids=[
        "has run",
        "far slower",
        "too many devices",
        "another type",
        "a group",
        "measured before",
        "too few steps left",
        "no step left",
    ],
)
def test_no_option_is_tried_that_has_run_cannot_win_or_does_not_fit(job):
    assert tried(job) == [0]


def test_trying_must_pay_for_its_switches_and_those_of_a_running_job_count_twice():
    slight = SpeedBelief(mean=0.0, spread=0.1, own_spread=0.02)
    job = job_of(DDP, replace(FSDP, runtime_s=20_000.0), beliefs=[slight, slight])
    gain_s = 20_000 * expected_saving(0.0, math.hypot(0.02, 0.02))
    assert tried(job, switch_cost_s=0.7 * gain_s) == [1, 0]
    assert tried(replace(job, is_running=True), switch_cost_s=0.7 * gain_s) == [0]


def test_the_most_promising_options_are_tried_if_not_all_may_be():
    options = [DDP, *(Option("fsdp", 2, 20_000.0 * factor) for factor in (1.3, 1.01, 1.2, 1.1))]
    assert tried(job_of(*options), most=2) == [2, 4, 0]


def test_an_option_that_leaves_devices_is_tried_only_where_another_job_would_use_them():
    frugal = replace(DDP, num_devices=1, runtime_s=1.9 * DDP.runtime_s)
    job, planned = job_of(DDP, frugal, total_steps=100), replace(PLANNED, last_step=100)
    assert tried(job, planned=[planned]) == [0]
    assert tried(job, planned=[planned, replace(planned, job="b", start_s=planned.end_s)]) == [1, 0, 0]


def test_jobs_that_may_not_change_their_options_are_left_alone():
    assert explored([PLANNED], {}, switch_cost_s=1.0, most=8) == [PLANNED]


def test_only_the_first_segment_of_a_job_is_preceded():
    later = replace(PLANNED, option=1, last_step=20_000, start_s=20_000.0, end_s=40_000.0)
    third = Option("zero1", 2, 20_000.0)
    job = job_of(DDP, replace(FSDP, runtime_s=20_000.0), third, beliefs=[SURE, SURE, UNSURE], total_steps=20_000)
    assert tried(job, planned=(PLANNED, later)) == [2, 0, 1]


def test_the_expected_saving_is_that_of_many_draws():
    draw = Random(0)
    for mean, spread in ((0.0, 0.3), (0.2, 0.25), (-0.1, 0.1), (0.5, 0.0), (-0.5, 0.0)):
        drawn = [max(0.0, 1 - math.exp(draw.gauss(mean, spread))) for _ in range(40_000)]
        assert expected_saving(mean, spread) == pytest.approx(sum(drawn) / len(drawn), abs=0.004)


def test_a_trial_that_a_new_plan_continues_is_none_any_more_and_says_so():
    trial = replace(PLANNED, last_step=6, is_trial=True, reason="measures ddp up to step 6")
    assert trial.until(4) == replace(trial, last_step=4)
    goes_on = trial.until(100)
    assert (goes_on.last_step, goes_on.is_trial, goes_on.reason) == (100, False, "continues after its trial")
    assert PLANNED.until(100) == replace(PLANNED, last_step=100)
