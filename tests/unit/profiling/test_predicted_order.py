"""The order and number of trials follow from predictions."""

import math
import random

import pytest

from benchmarks.search import replay
from ringmaster.codec import to_json
from ringmaster.tasks.profiling.search import (
    FAR_BEHIND_PREDICTED,
    FEWEST_TRIALS,
    ConfigSearch,
    quickest_looking_first,
    worthwhile,
)
from ringmaster.techniques import Profile
from ringmaster.techniques.preflight_result import Candidate

TECHNIQUES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline")


def candidate(technique, number, step_s, num_devices=2):
    config = {"micro_batch": number}
    return Candidate(
        technique=technique,
        config=config,
        num_devices=num_devices,
        num_ranks=num_devices,
        least_bytes=1,
        step_s=step_s,
    )


def search(technique, *predicted_s):
    every = [candidate(technique, i, step_s) for i, step_s in enumerate(predicted_s)]
    return ConfigSearch(key="k", job="j", candidates=every, fingerprints=[f"{technique}{i}" for i in range(len(every))])


def measured(step_s, technique="ddp"):
    return Profile(technique=technique, num_devices=2, num_ranks=2, step_s=step_s, peak_bytes=1)


def test_what_looks_quickest_comes_first_and_what_is_not_predicted_stays_as_listed():
    listed = [candidate("ddp", 0, 3.0), candidate("ddp", 1, 1.0), candidate("ddp", 2, 2.0)]
    assert [c.step_s for c in quickest_looking_first(listed)] == [1.0, 2.0, 3.0]
    unknown = [*listed, candidate("ddp", 3, None)]
    assert quickest_looking_first(unknown) == unknown


def test_what_is_predicted_to_be_far_behind_is_not_begun():
    best, near, far = search("ddp", 1.0), search("zero2", 1.1), search("tensor", FAR_BEHIND_PREDICTED * 1.01)
    assert worthwhile([best, near, far]) == [best, near, far]  # nothing is measured yet
    best.results["ddp0"] = measured(20.0)
    assert near in worthwhile([best, near, far])
    assert far not in worthwhile([best, near, far])


def test_a_search_bears_with_configs_that_are_no_faster():
    each, known = search("ddp", 1.0, 1.2, 1.1, 0.9, 1.0, 1.0, 1.0, 1.0, 0.5), {}
    while (wanted := each.next_trial()) is not None:
        known[wanted[0]] = measured(wanted[1].step_s)
        each.take(known)
    assert len(each.results) == 8


def test_no_more_than_a_quarter_is_tried():
    searches = [search(name, *(1.0 + i / 100 for i in range(4))) for name in TECHNIQUES]
    for tried, each in enumerate(searches):
        assert bool(worthwhile(searches)) == (tried < 24 / 4)
        each.results[each.fingerprints[0]] = measured(1.0, each.candidates[0].technique)
    assert worthwhile(searches) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_quarter_of_the_trials_finds_what_is_nearly_best_where_predictions_are_rough(seed):
    """True times are 0.8 to 1.25 times the predictions for a technique, and 3 % off for a config."""
    draw, rows = random.Random(seed), []
    for technique in TECHNIQUES:
        bias, base = math.exp(draw.uniform(math.log(0.8), math.log(1.25))), draw.uniform(1, 3)
        for i in range(12):
            predicted_s = base * (1 + i * 0.08)
            step_s = predicted_s * bias * draw.uniform(0.97, 1.03)
            rows.append({"candidate": to_json(candidate(technique, i, predicted_s)), "seconds": [step_s]})
    best_s, found_s, num_trials = replay(rows)
    assert len(rows) == 72
    assert FEWEST_TRIALS <= num_trials <= len(rows) / 4 + len(TECHNIQUES)
    assert found_s <= 1.05 * best_s
