"""Figures of the adapter benchmark, computed from its measurements."""

import pytest

from benchmarks.adapters import sweep as sweeps
from benchmarks.adapters.baselines import shared_out
from benchmarks.adapters.tables import memory_lines, ratios


def test_jobs_are_shared_out_evenly_and_each_once():
    assert shared_out(5, 2) == ((0, 2, 4), (1, 3))
    assert shared_out(3, 1) == ((0, 1, 2),)


def test_contenders_are_compared_round_by_round():
    # The machine was twice as slow in the second round. A ratio of medians would hide that both rounds agree.
    assert ratios([3.0, 6.0], [2.0, 4.0]) == [1.5, 1.5]


def test_memory_stands_beside_that_of_one_on_the_same_base():
    rows = [
        {"base": base, "recompute": "none", "adapters": count, "peak_mib": peak}
        for base, count, peak in [("small", 1, 10.0), ("large", 1, 100.0), ("large", 16, 150.0)]
    ]
    *_, last = memory_lines(rows, "now.")
    assert last == "| large | none | 16 | 150 | 1.50 | 0.09 |"


def test_a_sweep_is_compared_with_the_groups_of_its_own_round_and_profiles():
    def row(number, who, profiles, seconds):
        figures = {"seconds": seconds, "training_s": seconds / 2, "profiling_s": 0.0}
        return {"round": number, "who": who, "profiles": profiles, **figures}

    rows = [
        row(number, who, profiles, seconds * slow * cold)
        for number, slow in enumerate([1, 3])
        for profiles, cold in [(sweeps.COLD, 2), (sweeps.WARM, 1)]
        for who, seconds in [(sweeps.TOGETHER, 10.0), (sweeps.ALONE, 15.0), (sweeps.IN_TURN, 20.0)]
    ]
    found = {(each["who"], each["profiles"]): each for each in sweeps.summary(rows)}
    assert found[sweeps.TOGETHER, sweeps.WARM]["seconds"] == pytest.approx(20.0)
    assert found[sweeps.ALONE, sweeps.COLD]["times"] == pytest.approx(1.5)
    assert found[sweeps.IN_TURN, sweeps.WARM]["times"] == pytest.approx(2.0)
