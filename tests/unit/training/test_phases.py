"""Phases of a job: which samples a step reads, where its schedule stands, and when it is evaluated."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.codec import from_json, to_json
from ringmaster.features.target.job import Phases, Target, Variables
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec
from ringmaster.techniques.job import TrainingPhase

PLAIN = Job(
    name="a",
    model=ModelSpec(factory="a:b"),
    data=DataSpec(source="digits"),
    num_steps=100,
    global_batch_size=16,
    evaluation=EvaluationSpec(every_steps=25, at_steps=(3, 90)),
)


def phase(first_step, size, num_steps, *, lr_factor=1.0, precision="fp32"):
    return TrainingPhase(
        first_step=first_step,
        global_batch_size=size,
        precision=precision,
        lr_factor=lr_factor,
        num_steps=num_steps,
    )


CHANGED = replace(
    PLAIN,
    num_steps=55,
    features=(Phases(phases=(phase(0, 16, 100), phase(10, 64, 55, lr_factor=2.0, precision="bf16"))),),
)


def test_a_job_without_phases_has_that_of_its_own():
    assert PLAIN.phase(7) == phase(0, 16, 100)
    assert PLAIN.samples(7) == range(112, 128) and PLAIN.schedule_place(7) == (7, 100)
    assert [step for step in range(101) if PLAIN.is_evaluated(step)] == [3, 25, 50, 75, 90]
    assert "phases" not in to_json(PLAIN) and "may_vary" not in to_json(PLAIN) and "target" not in to_json(PLAIN)


def test_the_samples_of_steps_follow_each_other_without_a_gap():
    ranges = [CHANGED.samples(step) for step in range(CHANGED.total_steps)]
    assert [sample for each in ranges for sample in each] == list(range(10 * 16 + 45 * 64))
    assert (len(ranges[9]), len(ranges[10])) == (16, 64)


def test_a_schedule_ends_with_the_last_step_and_evaluations_keep_their_places_in_it():
    places = [CHANGED.schedule_place(step)[0] for step in range(56)]
    assert places[10] == 10 and places[11] == 12 and places[55] == pytest.approx(100)
    assert [step for step in range(56) if CHANGED.is_evaluated(step)] == [3, 18, 30, 43, 50]


def test_a_step_has_the_batch_size_and_the_precision_of_its_phase():
    assert CHANGED.phase(30).variant == (64, "bf16", 1) and CHANGED.phase(9).variant == (16, "fp32", 1)
    assert from_json(Job, to_json(CHANGED)) == CHANGED


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([4, 8, 64]), st.integers(31, 200)), max_size=3))
def test_any_list_of_phases_reads_each_sample_once_and_ends_its_schedule(changes):
    phases, first = [phase(0, 16, 100)], 0
    for length, size, rest in changes:
        first += length
        phases.append(phase(first, size, first + rest))
    job = replace(PLAIN, num_steps=phases[-1].num_steps, features=(Phases(phases=tuple(phases)),))

    ends = [job.samples(step) for step in range(job.total_steps)]

    assert all(one.stop == other.start for one, other in pairwise(ends)) and ends[0].start == 0
    places = [job.schedule_place(step)[0] for step in range(job.total_steps + 1)]
    assert places == sorted(places) and places[-1] == pytest.approx(100)


@pytest.mark.parametrize(
    ("target", "metrics", "is_reached"),
    [
        (Target(metric="loss", at_most=2.0), {"loss": 2.0}, True),
        (Target(metric="loss", at_most=2.0), {"loss": 2.01}, False),
        (Target(metric="accuracy", at_least=0.9), {"accuracy": 0.95}, True),
        (Target(metric="accuracy", at_least=0.9), {"accuracy": float("nan")}, False),
        (Target(metric="accuracy", at_least=0.0), {}, False),
    ],
)
def test_a_target_is_reached_by_an_evaluation_of_its_metric(target, metrics, is_reached):
    assert target.is_reached(metrics) == is_reached


def test_the_choices_of_a_job_begin_with_its_own():
    variables = Variables(global_batch_size=(64, 16), precision=("bf16", "fp32"))
    assert variables.choices(PLAIN) == [(16, "fp32", 1), (64, "bf16", 1), (64, "fp32", 1), (16, "bf16", 1)]
    assert Variables().choices(PLAIN) == [(16, "fp32", 1)]


@pytest.mark.parametrize(("workers", "relaxed"), [(None, []), (1, []), (3, [24]), (4, [16, 24]), (5, [])], ids=str)
def test_local_updates_take_workers_that_share_the_batch(workers, relaxed):
    variables = Variables(global_batch_size=(16, 24), sync_every=(1, 8), workers=workers)
    assert [each[0] for each in variables.choices(PLAIN) if each[2] > 1] == relaxed
    assert PLAIN.with_features(variables, Target(metric="loss", at_most=1.0)).varies
    assert not PLAIN.with_features(variables).varies


def test_learning_rates_are_tried_by_the_same_job_for_a_twentieth_of_its_steps():
    job = replace(PLAIN, num_steps=1000, features=(Variables(lr=(1e-3, 2e-5)), Target(metric="loss", at_most=1.0)))
    assert [(each.name, each.optimizer.lr) for each in job.searches()] == [("a.lr-0.001", 1e-3), ("a.lr-2e-05", 2e-5)]
    for search in job.searches():
        assert (
            search.num_steps == 1000
            and search.is_evaluated(50)
            and search.feature(Target) is None
            and not search.searches()
        )
        assert [search.learning_rate(step) for step in range(9)] == [
            search.optimizer.lr / job.optimizer.lr * job.learning_rate(step) for step in range(9)
        ]
    assert not job.varies and PLAIN.searches() == []
