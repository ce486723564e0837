"""Comparison of two models."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.techniques.metric import BUILTIN_METRICS, gain, metric_named, ranked

METRIC = st.sampled_from(tuple(BUILTIN_METRICS))
VALUE = st.floats(-1e6, 1e6)
ANYTHING = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize(
    ("metric", "challenger", "champion", "won"),
    [("accuracy", 0.9, 0.7, 0.2), ("loss", 2.0, 2.5, 0.5), ("perplexity", 30.0, 20.0, -10.0)],
)
def test_gain_is_positive_where_the_challenger_is_better(metric, challenger, champion, won):
    assert gain(challenger, champion, metric=metric) == pytest.approx(won)


@given(METRIC, ANYTHING, ANYTHING)
def test_of_two_models_at_most_one_is_better(metric, one, other):
    assert not (gain(one, other, metric=metric) > 0 and gain(other, one, metric=metric) > 0)


@given(METRIC, VALUE, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_nothing_is_better_or_worse_than_what_is_not_finite(metric, value, broken):
    assert not gain(broken, value, metric=metric) > 0
    assert not gain(value, broken, metric=metric) > 0


def test_an_unknown_metric_is_told_with_those_there_are():
    with pytest.raises(ValueError, match="unknown metric 'bleu': there are loss, perplexity, accuracy"):
        gain(1.0, 2.0, metric="bleu")


@given(METRIC, st.dictionaries(st.text(min_size=1), ANYTHING))
def test_ranks_hold_every_name_once_the_best_first_and_the_broken_last(metric, values):
    names = ranked(values, metric=metric)
    assert sorted(names) == sorted(values)
    finite = [math.isfinite(values[name]) for name in names]
    assert finite == sorted(finite, reverse=True)
    ordered = [values[name] for name, is_finite in zip(names, finite, strict=True) if is_finite]
    assert ordered == sorted(ordered, reverse=metric_named(metric).higher_is_better)


def test_equals_keep_their_order():
    assert ranked({"b": 1.0, "a": 1.0, "c": 0.5}, metric="accuracy") == ["b", "a", "c"]
