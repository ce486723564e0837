"""Confidence intervals with the stated coverage, and the power of comparisons."""

import math

import numpy as np
import pytest

from ringmaster.tasks.evaluation.scores import MetricRows, compare, estimate
from ringmaster.techniques.metric import metric_named


def rows(values, counts=None, *, metric="loss"):
    measure, values = metric_named(metric), np.asarray(values, float)
    counts = np.ones(len(values)) if counts is None else np.asarray(counts, float)
    return MetricRows(measure, dict(zip(measure.sums, (values, counts), strict=True)))


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    draw = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        found = estimate(rows(draw.exponential(2.0, 120)), num_draws=300, seed=seed)
        assert found.low <= found.value <= found.high
        covered += found.low <= 2.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_rows_count_as_much_as_they_hold():
    assert rows([2.0, 30.0], counts=[1, 9]).value == pytest.approx(3.2)
    assert rows([2.0, 30.0], counts=[1, 9], metric="perplexity").value == pytest.approx(math.exp(3.2))


def test_a_small_difference_on_the_same_rows_is_seen_though_rows_differ_much():
    draw = np.random.default_rng(2)
    hard = draw.exponential(5.0, 400)  # the difficulty of each row, common to both models
    champion, challenger = rows(hard + 0.3), rows(hard + draw.normal(0, 0.05, 400))
    found = compare(challenger, champion)
    assert found.gain == pytest.approx(0.3, abs=0.02)
    assert 0.28 < found.low < found.gain < found.high < 0.32
    assert found.p_better < 0.001
    assert found.p_worse > 0.99
    back = compare(champion, challenger)
    assert back.gain == -found.gain
    assert back.p_worse < 0.001


def test_where_there_is_no_difference_a_gain_is_claimed_as_rarely_as_p_says():
    draw = np.random.default_rng(3)
    claims = 0
    for seed in range(200):
        a, b = rows(draw.normal(0, 1, 80)), rows(draw.normal(0, 1, 80))
        claims += compare(a, b, num_draws=300, seed=seed).p_better < 0.05
    assert claims / 200 <= 0.1


@pytest.mark.parametrize(("num_rows", "least"), [(1, 0.5), (4, 0.0625), (5, 0.03125)])
def test_few_rows_that_all_gained_may_be_chance(num_rows, least):
    """The values are those of the sign test. Rows with equal results do not count."""
    alike, ones = [1.0] * 10, [1.0] * num_rows
    better, worse = rows([*alike, *ones]), rows([*alike, *[2.0] * num_rows])
    found = compare(better, worse)
    assert found.p_better >= least
    assert compare(worse, better).p_worse >= least
    assert compare(rows(ones), rows([2.0] * num_rows)).p_better == least


def test_a_slice_is_the_same_metric_of_fewer_rows():
    every = rows([1.0, 2.0, 30.0], counts=[1, 1, 10])
    assert every.where(np.array([True, False, True])).value == pytest.approx(31 / 11)


def test_what_counts_nothing_is_no_number_and_claims_nothing():
    empty = rows([])
    assert math.isnan(estimate(empty).value)
    assert math.isnan(estimate(rows([0.0], counts=[0])).low)
    found = compare(empty, empty)
    assert (found.p_better, found.p_worse) == (1.0, 1.0)
    broken = compare(rows([math.nan, 1.0]), rows([0.0, 0.0]))
    assert broken.p_better == 1.0


def test_different_rows_are_refused():
    with pytest.raises(ValueError, match="3 rows cannot be compared with 2"):
        compare(rows([1, 2, 3]), rows([1, 2]))
    with pytest.raises(ValueError, match="not of the same rows"):
        MetricRows(metric_named("loss"), {"loss_sums": np.zeros(3), "loss_counts": np.zeros(2)})


def test_a_share_without_an_error_has_wilsons_interval():
    found = estimate(rows(np.ones(20), metric="accuracy"))
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.8389, abs=1e-4)  # 20 of 20 at 95 %, from tables of Wilson's interval
    wrong = estimate(rows(np.zeros(20), metric="accuracy"))
    assert (wrong.low, wrong.high) == (0.0, pytest.approx(1 - found.low))
    assert estimate(rows(np.ones(200), metric="accuracy")).low > found.low
    assert estimate(rows(np.ones(20))).low == 1.0  # not a share, so its range is unknown
    one_wrong = estimate(rows([0.0] + [1.0] * 19, metric="accuracy"))
    assert 0.0 < one_wrong.low < one_wrong.value < one_wrong.high <= 1.0


def test_two_models_that_are_right_on_the_same_rows_may_still_differ_on_others():
    hits = rows([1.0, 0.0, 1.0, 1.0], metric="accuracy")
    found = compare(hits, hits)
    assert found.gain == 0.0
    assert 0.0 < found.high == -found.low < 1.0
    assert (found.p_better, found.p_worse) == (1.0, 1.0)
    nothing = rows([0.0, 0.0], counts=[0, 0], metric="accuracy")
    assert math.isnan(compare(nothing, nothing).high)
    assert math.isnan(estimate(nothing).high)
