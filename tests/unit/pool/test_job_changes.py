"""The settings of clones, which follow the rules of batch files."""

from dataclasses import replace

import pytest

from ringmaster.features.stores.job import StoreSettings
from ringmaster.features.target.job import Phases
from ringmaster.tasks.control.job_changes import change_faults, with_settings
from ringmaster.techniques.job_specs import ScheduleSpec
from tests.unit.execution.fakes import job

SMOOTH = replace(job("a", num_steps=20), loss="cross-entropy", loss_options={"label_smoothing": 0.1})

STORE = replace(job("a", num_steps=20), features=(StoreSettings(),))
PROBE = SMOOTH.phase(0)
PHASED = SMOOTH.with_features(Phases(phases=(PROBE, replace(PROBE, first_step=8, global_batch_size=32))))


@pytest.mark.parametrize(
    ("source", "settings", "faults"),
    [
        (
            job("a", num_steps=20),
            {"loss.label_smoothing": 7},
            ["loss.label_smoothing: the loss of a is its model's own, which has no options"],
        ),
        (SMOOTH, {"loss.label_smoothing": 7}, ["loss.label_smoothing: must be a number at least 0 and below 1, not 7"]),
        (
            SMOOTH,
            {"optimizer.options.betas": 7, "optimizer.options.nesterov": True, "seed": 1.5},
            [
                "optimizer.options.betas: must be two numbers of at least 0 and below 1, such as [0.9, 0.99], got 7",
                "optimizer.options.nesterov: is an unknown option. To fix: the options are amsgrad, betas, eps",
                "seed: must be a whole number, got 1.5",
            ],
        ),
        (SMOOTH, {"optimizer.options.betas": [0.9, 1.5]}, ["optimizer.options.betas: must be two numbers"]),
        (SMOOTH, {"optimizer.options.weight_decay": "x"}, ["optimizer.options.weight_decay: must be a number of at"]),
        (SMOOTH, {"optimizer.lr": -1, "schedule.name": "cosin"}, ["optimizer.lr: must be g", "schedule.name: 'cosin'"]),
        (SMOOTH, {"schedule.warmup_steps": 30}, ["schedule.warmup_steps: must be less than the 20 steps of the job"]),
        (SMOOTH, {"schedule.num_steps": 10}, ["schedule.num_steps: must be at least the 20 steps of the job"]),
        (STORE, {"num_steps": 3}, ["a does not train on its own, so none of its values can differ"]),
        (PHASED, {"num_steps": 8}, ["num_steps: a has changed its batches after 8 steps. To fix: give more than 8"]),
        (
            SMOOTH,
            {"schedule.nam": 3, "schedule": 7},
            ["schedule.nam: lies inside schedule, which is given too", "schedule: must be a mapping, got 7"],
        ),
        (SMOOTH, {"num_epochs": 3, "num_steps": 0}, ["num_epochs: a job that runs counts in steps", "num_steps: must"]),
        (SMOOTH, {"clip_grad_norm": float("nan")}, ["clip_grad_norm: must be greater than 0, got nan"]),
        (
            SMOOTH,
            {"optimizer.lr.x": 3, "optimizer.lr.": 3, "seed.x": 1, "schedule.name.x": "a", "num_steps.x": 3},
            [
                "optimizer.lr.x: lies inside optimizer.lr, which has no keys, got 0.001. To fix: give optimizer.lr",
                "optimizer.lr.: lies inside optimizer.lr, which has no keys",
                "seed.x: lies inside seed, which has no keys, got 0",
                "schedule.name.x: lies inside schedule.name, which has no keys, got 'constant'",
                "num_steps.x: lies inside num_steps, which has no keys, got 20",
            ],
        ),
        (
            SMOOTH,
            {"loss.label_smoothing.0": 1, "seed": None},
            ["loss.label_smoothing.0: lies", "seed: must be a whole"],
        ),
        (
            SMOOTH,
            {"schedule.warmup_steps": 2, "schedule": {"name": "cosine"}},
            ["schedule.warmup_steps: lies inside schedule, which is given too. To fix: give one of the two"],
        ),
        (SMOOTH, {"seeds": 1, "precision": "bf16"}, ["seeds is unknown or", "precision is unknown or"]),
    ],
)
def test_all_faults_of_a_clone_are_told_with_key_value_and_remedy(source, settings, faults):
    told = change_faults(source, settings)
    assert sorted(fault[: len(known)] for fault, known in zip(sorted(told), sorted(faults), strict=True)) == sorted(
        faults
    )
    assert all("To fix: " in fault for fault in told)
    with pytest.raises(ValueError, match="To fix"):
        with_settings(source, settings, name="b")


def test_what_a_clone_may_differ_in_is_set():
    settings = {
        "optimizer.options.betas": [0.8, 0.9],
        "loss.label_smoothing": 0.2,
        "num_steps": 30,
        "clip_grad_norm": 1,
    }
    clone = with_settings(SMOOTH, settings, name="b")
    assert clone == replace(
        SMOOTH,
        name="b",
        optimizer=replace(SMOOTH.optimizer, options={"betas": [0.8, 0.9]}),
        loss_options={"label_smoothing": 0.2},
        num_steps=30,
        clip_grad_norm=1.0,
    )


@pytest.mark.parametrize("num_steps", [12, 40])
def test_the_schedule_of_a_job_that_has_changed_its_batches_ends_with_the_steps_that_are_set(num_steps):
    source = replace(PHASED, schedule=ScheduleSpec(name="linear"))
    clone = with_settings(source, {"num_steps": num_steps}, name="b")
    rates = [clone.learning_rate(step) for step in range(num_steps + 1)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-2] > 0 and rates[-1] == pytest.approx(0, abs=1e-12)
