"""The conditions under which a challenger is promoted, and the sentences that give the reason."""

import math

import numpy as np
import pytest

from ringmaster.tasks.evaluation.examination import ExaminationResult, SliceMetric, measure
from ringmaster.tasks.evaluation.scores import CLASSIFIER, Scores
from ringmaster.tasks.retraining.policy import PLAIN_RULE, comparison, decide_by

FIRST = "the first one, with accuracy 0.9 (95 % interval 0.85 to 0.93) on 200 rows"
EQUAL = "the new model is as good as the champion (95 % interval 0.05 worse to 0.05 better) on 200 rows: accuracy 0.8 "
ROWS = "on 200 rows: accuracy"


def measured(value, other=None, *, gain=None, metric="accuracy", num_rows=200, width=0.05):
    """A metric over all rows."""
    if gain is None and other is not None:
        gain = value - other if math.isfinite(value) and math.isfinite(other) else math.nan
    compared = {} if other is None else {"gain": gain, "gain_low": gain - width, "gain_high": gain + width}
    compared |= {} if other is None else {"p_better": 0.01, "p_worse": 0.99}
    interval = {"low": value - 0.05, "high": value + 0.03}
    return SliceMetric(
        metric=metric, slice="all", num_rows=num_rows, value=value, level=0.95, other=other, **interval, **compared
    )


def decide(line, *, min_gain=0.0, metric="accuracy"):
    examined = [ExaminationResult(measured=(line,), num_rows=line.num_rows)]
    return decide_by(PLAIN_RULE, examined, metric=metric, is_first=line.other is None, min_gain=min_gain)


@pytest.mark.parametrize(
    ("line", "min_gain", "promote", "why"),
    [
        (measured(0.9), 0.0, True, FIRST),
        (
            measured(0.9, 0.8),
            0.0,
            True,
            f"the new model is better by 0.1 (95 % interval 0.05 to 0.15) {ROWS} 0.9 against 0.8",
        ),
        (
            measured(0.9, 0.8, width=0.12),
            0.0,
            True,
            f"the new model is better by 0.1 (95 % interval 0.02 worse to 0.22 better) {ROWS} 0.9 against 0.8",
        ),
        (
            measured(0.9, 0.8),
            0.5,
            False,
            f"the new model is better by 0.1 (95 % interval 0.05 to 0.15) {ROWS} 0.9 against 0.8, which is less than "
            "the 0.5 that is wanted",
        ),
        (measured(0.8, 0.8), 0.0, False, f"{EQUAL}against 0.8"),
        (
            measured(0.7, 0.8),
            0.0,
            False,
            f"the new model is worse by 0.1 (95 % interval 0.05 to 0.15) {ROWS} 0.7 against 0.8",
        ),
        (measured(math.nan), 0.0, False, "its accuracy is nan on 200 rows"),
        (measured(math.nan, 0.8), 0.0, False, "its accuracy is nan on 200 rows"),
        (measured(math.inf, 0.8), 0.0, False, "its accuracy is inf on 200 rows"),
    ],
)
def test_only_what_is_better_by_enough_is_promoted(line, min_gain, promote, why):
    decision = decide(line, min_gain=min_gain)
    assert (decision.promote, decision.why, decision.compared) == (promote, why, line)


def test_a_champion_without_a_value_is_to_be_inspected():
    decision = decide(measured(0.9, math.nan))
    assert not decision.promote
    assert decision.reasons[0] == "the champion's accuracy is nan on this data: inspect the data"


def test_a_lower_loss_is_promoted():
    assert decide(measured(1.0, 2.0, gain=1.0, metric="loss"), metric="loss").promote
    assert not decide(measured(2.0, 1.0, gain=-1.0, metric="loss"), metric="loss").promote


def test_one_row_is_no_rows():
    assert "on 1 row:" in comparison(measured(0.9, 0.8, num_rows=1))


def test_a_gain_on_200_rows_is_told_with_its_interval():
    """As in a report: 135 against 128 of 200 rows are right."""

    def scores(num_right):
        return Scores(
            kind=CLASSIFIER, num_rows=200, sums={"hits": np.arange(200) < num_right, "labelled": np.ones(200)}
        )

    (line,) = measure(scores(135), scores(128), metrics=["accuracy"])
    decision = decide(line)
    assert decision.promote
    assert decision.why == (
        "the new model is better by 0.035 (95 % interval 0.01 to 0.065) on 200 rows: accuracy 0.675 against 0.64"
    )
