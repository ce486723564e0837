"""The conditions under which a challenger is promoted."""

import math

import pytest

from ringmaster.tasks.promotion.policy import decide


@pytest.mark.parametrize(
    ("challenger", "champion", "min_gain", "promote", "why"),
    [
        (0.9, None, 0.0, True, "the first one, with accuracy 0.9"),
        (0.9, 0.8, 0.0, True, "better: accuracy 0.9 against 0.8"),
        (0.9, 0.8, 0.5, False, "better by less than 0.5: accuracy 0.9 against 0.8"),
        (0.8, 0.8, 0.0, False, "not better: accuracy 0.8 against 0.8"),
        (0.7, 0.8, 0.0, False, "not better: accuracy 0.7 against 0.8"),
        (math.nan, None, 0.0, False, "its accuracy is nan"),
        (math.nan, 0.8, 0.0, False, "its accuracy is nan"),
        (math.inf, 0.8, 0.0, False, "its accuracy is inf"),
        (0.9, math.nan, 0.0, False, "the champion's accuracy is nan on this data: inspect the data"),
    ],
)
def test_only_what_is_better_by_enough_is_promoted(challenger, champion, min_gain, promote, why):
    decision = decide(challenger, champion, metric="accuracy", min_gain=min_gain)
    assert (decision.promote, decision.why) == (promote, why)


def test_a_lower_loss_is_promoted():
    assert decide(1.0, 2.0, metric="loss").promote
    assert not decide(2.0, 1.0, metric="loss").promote
