"""Learning-rate schedules: their shapes, and the same numbers as transformers' schedules of the same names."""

import pytest
import torch

from ringmaster.codec import to_json
from ringmaster.techniques import ScheduleSpec

NUM_STEPS, NUM_WARMUP = 50, 5


def factors(schedule, *, num_steps=NUM_STEPS):
    return [schedule.factor(step, num_steps=num_steps) for step in range(num_steps)]


def of_transformers(name, **options):
    import transformers.optimization  # imports peft and torch's compiler, for a second

    make = getattr(transformers.optimization, f"get_{name}")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, **options)
    found = []
    for _ in range(NUM_STEPS + 1):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        (
            ScheduleSpec(name="linear", warmup_steps=NUM_WARMUP),
            lambda: of_transformers(
                "linear_schedule_with_warmup", num_warmup_steps=NUM_WARMUP, num_training_steps=NUM_STEPS
            ),
        ),
        (
            ScheduleSpec(name="cosine", warmup_ratio=0.1, min_lr_ratio=0.2),
            lambda: of_transformers(
                "cosine_with_min_lr_schedule_with_warmup",
                num_warmup_steps=NUM_WARMUP,
                num_training_steps=NUM_STEPS,
                min_lr_rate=0.2,
            ),
        ),
        (
            ScheduleSpec(name="wsd", warmup_steps=NUM_WARMUP, decay_ratio=0.3, min_lr_ratio=0.1),
            lambda: of_transformers(
                "wsd_schedule",
                num_warmup_steps=NUM_WARMUP,
                num_decay_steps=15,
                num_training_steps=NUM_STEPS,
                decay_type="linear",
                min_lr_ratio=0.1,
            ),
        ),
    ],
    ids=["linear", "cosine", "wsd"],
)
def test_after_the_warm_up_the_factors_are_those_of_transformers(schedule, theirs):
    assert factors(schedule)[NUM_WARMUP:] == pytest.approx(theirs()[NUM_WARMUP:NUM_STEPS], rel=0, abs=1e-12)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_the_warm_up_is_one_step_ahead_of_transformers(name):
    theirs = of_transformers("linear_schedule_with_warmup", num_warmup_steps=NUM_WARMUP, num_training_steps=NUM_STEPS)
    assert factors(ScheduleSpec(name=name, warmup_steps=NUM_WARMUP))[:NUM_WARMUP] == pytest.approx(
        theirs[1 : NUM_WARMUP + 1], rel=0, abs=1e-12
    )


def test_a_linear_decay_ends_at_its_least_rate():
    ours = factors(ScheduleSpec(name="linear", min_lr_ratio=0.25), num_steps=4)
    assert ours == pytest.approx([1.0, 0.8125, 0.625, 0.4375])


def test_wsd_is_constant_until_the_last_tenth():
    ours = factors(ScheduleSpec(name="wsd", warmup_ratio=0.04))
    assert ours[:2] == [0.5, 1.0]
    assert set(ours[1:46]) == {1.0}
    assert ours[46:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_a_ratio_of_the_steps_is_rounded_up():
    assert ScheduleSpec(warmup_ratio=0.1).num_warmup_steps(11) == 2
    assert ScheduleSpec(name="wsd", decay_ratio=0.01).num_decay_steps(11) == 1


def test_a_schedule_without_the_new_keys_keeps_its_stored_form():
    assert to_json(ScheduleSpec(name="cosine", warmup_steps=3)) == {"name": "cosine", "warmup_steps": 3}
