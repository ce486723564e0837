"""The stopping policies alone: decisions from the progress of trials."""

import math

import pytest

from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy, SweepTrial
from tests.unit.sweeping.sweeps import TEMPLATE, spec

ASHA = StoppingPolicy(policy="asha", min_steps=4, reduction_factor=4)
HALVING = StoppingPolicy(policy="halving", min_steps=4, reduction_factor=4)
MEDIAN = StoppingPolicy(policy="median", min_steps=4)
CUT = StoppingPolicy()


def at_rung(scores, *, rung=4, total=64, goal=None):
    return [
        SweepTrial(name=f"t{i}", total=total, goal=goal or rung, scores={} if score is None else {rung: score})
        for i, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("stopping", "total", "rungs"),
    [
        (ASHA, 64, [4, 16, 64]),
        (ASHA, 60, [4, 16, 60]),
        (ASHA, 20, [4, 20]),
        (StoppingPolicy(policy="asha", reduction_factor=3), 90, [10, 30, 90]),
        (StoppingPolicy(policy="asha"), 3, [1, 3]),
        (StoppingPolicy(policy="asha"), 160, [16, 64, 160]),
        (CUT, 1000, [40, 100, 1000]),
        (CUT, 60, [10, 60]),
        (CUT, 15, [15]),
        (StoppingPolicy(min_steps=4), 64, [4, 7, 64]),
        (MEDIAN, 64, [64]),
        (StoppingPolicy(policy="none"), 64, [64]),
    ],
)
def test_rungs(stopping, total, rungs):
    assert stopping.rungs(total) == rungs


def test_halving_waits_until_the_rung_is_full():
    some = at_rung([5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, None])
    assert not HALVING.judge(some, num_slots=2).goals
    full = at_rung([5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0])
    verdicts = HALVING.judge(full, num_slots=2)
    assert verdicts.goals == {"t0": 16, "t1": 16}
    assert set(verdicts.stops) == {f"t{i}" for i in range(2, 8)}


def test_asha_promotes_once_devices_would_have_nothing_else_to_do():
    busy = at_rung([5.0, 4.0, 3.0, 2.0, None, None, None, None])
    assert not ASHA.judge(busy, num_slots=2).goals
    assert ASHA.judge(busy, num_slots=4).goals == {"t0": 16}


@pytest.mark.parametrize("stopping", [ASHA, HALVING])
def test_all_of_the_best_go_on_together_once_no_trial_is_to_come(stopping):
    full = at_rung([float(-number) for number in range(16)])
    assert stopping.judge(full, num_slots=2).goals == {f"t{number}": 16 for number in range(4)}


def test_who_cannot_be_among_the_best_any_more_is_stopped_before_the_rung_is_full():
    trials = at_rung([5.0, 4.0, 3.0, None, None, None, None, None])
    assert set(HALVING.judge(trials, num_slots=2).stops) == {"t2"}


def test_one_goes_on_where_there_are_fewer_than_the_factor():
    assert HALVING.judge(at_rung([1.0, 2.0]), num_slots=2).goals == {"t1": 16}


def test_places_that_are_kept_count_as_trials_to_come():
    trials = [*at_rung([5.0, 4.0]), SweepTrial(name="late", total=64)]
    assert not HALVING.judge(trials, num_slots=2).goals


def test_what_is_no_number_never_goes_on():
    verdicts = ASHA.judge(at_rung([-math.inf, 1.0]), num_slots=2)
    assert verdicts.goals == {"t1": 16}
    assert verdicts.stops == {"t0": "stopped early at step 4: its score is not a number"}


@pytest.mark.parametrize("scores", [{}, {4: 9.0}])
def test_trials_that_failed_leave_room_for_others(scores):
    failed = SweepTrial(name="failed", total=64, goal=4, has_ended=True, scores=scores)
    trials = [*at_rung([5.0, 4.0, 3.0]), failed]
    assert HALVING.judge(trials, num_slots=2).goals == {"t0": 16}


@pytest.mark.parametrize(("num", "kept"), [(30, (12, 6)), (8, (4, 2)), (32, (13, 7)), (3, (2, 1)), (1, (1, 1))])
def test_a_cut_keeps_two_of_five_and_then_a_fifth(num, kept):
    first = CUT.judge(at_rung([float(-i) for i in range(num)], rung=40, total=1000), num_slots=2)
    assert len(first.goals) == kept[0] and len(first.stops) == num - kept[0]
    second = CUT.judge(at_rung([float(-i) for i in range(kept[0])], rung=100, total=1000), num_slots=2)
    assert second.goals == {f"t{i}": 1000 for i in range(kept[1])}
    assert CUT.num_kept(30, rung=10, total=60) == 6, "one rung that represents both"


def test_a_cut_compares_means_of_three_evaluations_and_trains_on_whom_no_later_arrival_displaces():
    lucky = SweepTrial(name="lucky", total=1000, goal=40, scores={20: 0.0, 30: 0.0, 40: 2.0})
    steady = SweepTrial(name="steady", total=1000, goal=40, scores={5: -9.0, 20: 1.0, 30: 1.0, 40: 1.0})
    late = SweepTrial(name="late", total=1000, goal=40)
    assert list(CUT.judge([lucky, steady], num_slots=2).goals) == ["steady"]
    assert list(CUT.judge([lucky, steady, late], num_slots=2).goals) == ["steady"], "two of three are kept"
    (job, *_) = spec(stopping=CUT, template={**TEMPLATE, "num_steps": 1000}).batch().jobs
    assert job.evaluation.at_steps == (20, 30, 40, 80, 90, 100)


def test_the_median_rule():
    def trial(name, *scores, **changes):
        return SweepTrial(
            name=name, total=64, goal=64, scores={4 * (i + 1): s for i, s in enumerate(scores)}, **changes
        )

    others = [
        trial(name, *s, has_ended=True) for name, s in {"a": (1.0, 5.0), "b": (2.0, 6.0), "c": (3.0, 7.0)}.items()
    ]
    assert not MEDIAN.judge([*others, trial("good", 0.0, 6.5)], num_slots=2).stops
    assert list(MEDIAN.judge([*others, trial("bad", 4.0, 4.5)], num_slots=2).stops) == ["bad"]
    assert not MEDIAN.judge([*others[:2], trial("early", 0.0)], num_slots=2).stops, "too few to compare with"


def test_without_a_policy_nothing_follows():
    verdicts = StoppingPolicy(policy="none").judge(at_rung([1.0, 2.0, 3.0]), num_slots=2)
    assert (verdicts.goals, verdicts.stops) == ({}, {})
