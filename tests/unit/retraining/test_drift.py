"""Drift: known values, false positives by chance, and data that supports no decision."""

import math

import numpy as np
import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.retraining.drift import DriftEntry, FeatureReference, drift_of, drifts_of, ks, psi, reference_of

DRAW = np.random.default_rng(0)
NORMAL = DRAW.normal(size=2000)


def test_the_index_is_the_sum_over_bins():
    from scipy.stats import chi2

    then = FeatureReference(num_rows=100, counts=(50, 50, 0), categories=("a", "b"))
    index, by_chance = psi(then, ["a"] * 80 + ["b"] * 20)
    p, q = np.array([50.5, 50.5, 0.5]) / 101.5, np.array([80.5, 20.5, 0.5]) / 101.5
    assert index == pytest.approx(sum((q - p) * np.log(q / p)))
    assert by_chance == pytest.approx((1 / 100 + 1 / 100) * chi2.ppf(0.99, 2))


def test_equal_shares_have_no_index():
    assert psi(reference_of(NORMAL), NORMAL)[0] == 0.0


def test_a_category_that_was_never_seen_counts_and_is_finite():
    then = reference_of(["a", "b"] * 100)
    assert 1 < psi(then, ["c"] * 200)[0] < math.inf


def test_numbers_are_binned_by_the_references_quantiles():
    then = reference_of(NORMAL)
    assert len(then.counts) == 10
    assert sum(then.counts) == then.num_rows == 2000
    assert max(then.counts) - min(then.counts) <= 1
    assert psi(then, NORMAL + 1.0)[0] > 0.5


def test_numbers_that_are_all_alike_have_a_reference():
    then = reference_of(np.zeros(500))
    assert psi(then, np.zeros(500))[0] == pytest.approx(0.0)
    assert psi(then, np.ones(500) - 2.0)[0] > 1


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (np.ones(500), np.full(500, 5.0)),  # a constant that rises
        (np.ones(500), np.full(500, 0.5)),
        (np.repeat([0.0, 1.0], [50, 450]), np.repeat([0.0, 9.0], [50, 450])),  # most values are the maximum
        (np.repeat([0.0, 1.0], [450, 50]), np.repeat([-9.0, 1.0], [450, 50])),
        (np.repeat([0.0, 5.0, 9.0], [75, 350, 75]), np.repeat([0.0, 6.0, 9.0], [75, 350, 75])),
    ],
)
def test_a_value_that_many_rows_have_is_missed_where_they_have_another_one(then, now):
    assert psi(reference_of(then), then)[0] == pytest.approx(0.0)
    assert drift_of("x", reference_of(then), now, DriftEntry(psi=1.0)).has_drifted


def test_a_reference_of_a_former_release_is_compared_as_it_was():
    """A constant has one edge there, and all values that are not below the edge count as equal."""
    then = FeatureReference(num_rows=500, counts=(0, 500), edges=(1.0,), kept=(1.0,))
    assert not drift_of("x", then, np.full(500, 5.0), DriftEntry()).has_drifted
    assert drift_of("x", then, np.zeros(500), DriftEntry()).has_drifted


def test_few_rows_reach_a_large_index_by_chance_and_are_no_drift():
    then, rule = reference_of(NORMAL), DriftEntry(psi=0.1, min_rows=20)
    found = [drift_of("x", then, np.random.default_rng(seed).normal(size=30), rule) for seed in range(200)]
    assert max(drift.psi or 0.0 for drift in found) > 0.2
    assert np.mean([drift.has_drifted for drift in found]) <= 0.03


def test_drift_is_told_in_words():
    found = drift_of("x", reference_of(NORMAL), NORMAL + 1.0, DriftEntry(psi=0.2, ks=0.01))
    assert found.has_drifted
    assert "x has drifted: PSI 0." in found.why
    assert "Kolmogorov-Smirnov p" in found.why


def test_too_few_rows_tell_nothing():
    found = drift_of("x", reference_of(NORMAL), NORMAL[:99] + 9.0, DriftEntry())
    assert not found.has_drifted
    assert found.why == "x has 99 rows, too few to decide (min_rows 100)"
    empty = drift_of("x", reference_of(NORMAL), [], DriftEntry(min_rows=1))
    assert "too few" in empty.why


def test_the_kept_quantiles_give_nearly_the_p_of_all_values():
    from scipy.stats import ks_2samp

    other = np.random.default_rng(5).normal(0.1, size=800)
    assert ks(reference_of(NORMAL[:900]), other) == pytest.approx(ks_2samp(NORMAL[:900], other).pvalue, rel=0.2)


def test_what_is_no_number_in_a_log_is_left_out():
    then = reference_of([0.5, None, 1.5, math.nan, math.inf])
    assert then.num_rows == 2
    assert then.is_number


def test_whole_numbers_are_categories():
    assert reference_of(np.array([3, 3, 7])).categories == ("3", "7")


def test_the_most_frequent_categories_are_kept_and_the_rest_is_one_bin():
    then = reference_of(np.repeat(np.arange(50), np.arange(50, 0, -1)))
    assert len(then.categories) == 20
    assert then.categories[0] == "0"
    assert sum(then.counts) == then.num_rows


def test_features_that_both_know_are_compared_the_drifted_first():
    references = {"a": reference_of(NORMAL), "b": reference_of(NORMAL), "gone": reference_of(NORMAL)}
    found = drifts_of(references, {"a": NORMAL, "b": NORMAL + 2, "new": NORMAL}, DriftEntry())
    assert [(drift.feature, drift.has_drifted) for drift in found] == [("b", True), ("a", False)]


def test_a_reference_travels_as_json():
    for values in (NORMAL, ["a", "b"]):
        then = reference_of(values)
        assert from_json(FeatureReference, to_json(then)) == then


@pytest.mark.parametrize("nothing", [[], [None], [math.nan], np.array([math.nan, math.inf]), np.zeros(0)])
def test_nothing_has_no_reference(nothing):
    assert reference_of(nothing) is None
