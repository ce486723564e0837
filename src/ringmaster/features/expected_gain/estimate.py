"""The gain that the trials of a sweep which have not ended can be expected to bring, with an interval.

Scores are higher the better they are, and M is the best final score so far.

A trial without further information is a draw from where the n ended trials came from that got as far as it may get
(its *peers*), whatever that distribution is. The probability that such a draw exceeds M then has the distribution
Beta(1, n), which is a fact about ranks. By how much it exceeds M follows from the distances between the best scores:
near the end of the distribution, the i-th best score is as far from the next one as the
generalized Pareto distribution says, whose shape is -2 / d where d parameters matter and the optimum is smooth: the
distances x_i - x_(i+1) are independent and exponential, with expectations that are proportional to i^-(1 + shape), in
the limit. The shape has a uniform prior over `SHAPES`, the scale the prior 1 / scale.

A trial whose learning curve has come further is predicted by its last score plus the mean change from there to the
end of those that have ended, where this predicts each of these from the others better than their mean does; the
error has Student's distribution.

The distribution of the gain is drawn from, with a fixed seed: the same results give the same numbers.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

MIN_FINALS = 5
"""The fewest final scores: with fewer, there are no distances that say how far a better one may be away."""
MIN_PAIRS = 5
"""The fewest ended trials with a score after the same step, for a prediction from learning curves."""
SHAPES = (-2.0, -1.5, -1.0, -0.75, -0.5, -0.25, 0.0)
"""The shapes of the tail that are possible, equally likely beforehand; see above."""
TAIL_SHARE = 0.4
"""The share of the final scores that are the tail."""
NUM_DRAWS = 1000
COVERAGE = 0.9


@dataclass(frozen=True, kw_only=True)
class EndedTrial:
    """A trial that has ended.

    goal: the step up to which it was allowed to train.
    final: its score after its last step; None if it did not get there, or may not be the best.
    scores: by step.
    is_like_later: whether it was drawn as those that have not begun are.
    """

    goal: int
    final: float | None = None
    scores: Mapping[int, float]
    is_like_later: bool = True


@dataclass(frozen=True, kw_only=True)
class OpenTrial:
    """A trial that has not ended.

    goal: the step up to which it may train now; 0 if it has not begun.
    total: its last step.
    """

    goal: int
    total: int
    scores: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class ExpectedGain:
    """The expected gain in the best score of a sweep by the trials that have not ended.

    best: the best final score so far.
    gain: the expected gain, in the units of the score.
    low, high: the ends of the interval that contains the gain with the probability `COVERAGE`.
    probability: that any of them is better than the best so far.
    num_ended, num_open: how many trials have ended, and have not.
    """

    best: float
    gain: float
    low: float
    high: float
    probability: float
    num_ended: int
    num_open: int

    @property
    def share(self) -> float:
        """The expected gain as a share of the best score; infinite where that is 0 and the gain is not."""
        return self.relative(self.gain)

    def relative(self, gain: float) -> float:
        """Returns a gain as a share of the best score."""
        if not gain:
            return 0.0
        return gain / abs(self.best) if self.best else math.inf


def expected_gain(ended: Sequence[EndedTrial], open_trials: Sequence[OpenTrial]) -> ExpectedGain | None:
    """Returns the gain to be expected of the trials that have not ended; None where too few have ended to say anything.

    Equal final scores say nothing either: by how much another one may be better follows from their distances.

    All trials are draws of one distribution, such as those of random search.
    """
    finals = sorted((trial.final for trial in ended if trial.final is not None), reverse=True)
    if len(finals) < MIN_FINALS or finals[0] == finals[-1]:
        return None
    draw, best, tails = Random(0), finals[0], _tails(finals)
    predictions = {i: _predicted(each, ended) for i, each in enumerate(open_trials)}
    predicted = [each for each in predictions.values() if each is not None]
    plain = Counter(_num_peers(trial, ended) for i, trial in enumerate(open_trials) if predictions[i] is None)
    gains = []
    for tail in draw.choices(tails, [each.weight for each in tails], k=NUM_DRAWS):
        scale = tail.total / draw.gammavariate(tail.num, 1.0)
        gain = 0.0
        for num_peers, num in plain.items():
            exceeding = 1.0 - draw.random() ** (1.0 / num_peers)  # Beta(1, n)
            reached = -math.expm1(math.log(1.0 - draw.random()) / num)  # the share of draws above the best of `num`
            if reached < exceeding:
                gain = max(gain, scale * tail.distance(num_peers * reached, num_peers * exceeding))
        for mean, deviation, freedom in predicted:
            error = draw.gauss(0.0, 1.0) / math.sqrt(2.0 * draw.gammavariate(freedom / 2, 1.0) / freedom)
            gain = max(gain, mean + deviation * error - best)
        gains.append(gain)
    gains.sort()
    outside = (1 - COVERAGE) / 2
    return ExpectedGain(
        best=best,
        gain=statistics.fmean(gains),
        low=gains[math.floor(outside * NUM_DRAWS)],
        high=gains[math.ceil((1 - outside) * NUM_DRAWS) - 1],
        probability=sum(gain > 0 for gain in gains) / NUM_DRAWS,
        num_ended=len(ended),
        num_open=len(open_trials),
    )


def _num_peers(trial: OpenTrial, ended: Sequence[EndedTrial]) -> int:
    """Returns how many ended trials were allowed to train as far as a trial that has not ended."""
    peers = [other.is_like_later for other in ended if other.goal >= trial.goal]
    return sum(peers) or len(peers) or 1


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """A shape of the tail of a distribution of scores, with what its spacings say of the scale.

    total: the sum of the spacings, each divided by its expectation at the scale 1. num: their number.
    weight: the probability of the shape, up to a factor.
    """

    shape: float
    total: float
    num: int
    weight: float

    def distance(self, upper: float, lower: float) -> float:
        """Returns how far the score that `upper` draws exceed on average is above that which `lower` exceed."""
        if self.shape == 0:
            return math.log(lower / upper)
        return float(lower**-self.shape - upper**-self.shape) / -self.shape


def _tails(finals: Sequence[float]) -> list[_Tail]:
    """Returns the shapes of the tail with their posterior probabilities. finals: in falling order, not all equal.

    Equal scores, as of an accuracy on few rows, are closer than the metric can tell: half of the smallest distance of
    two scores is taken for theirs.
    """
    num = max(2, min(len(finals) - 1, math.ceil(len(finals) * TAIL_SHARE)))
    least = max(min(better - worse for better, worse in pairwise(finals) if better > worse) / 2, sys.float_info.min)
    spacings = [max(better - worse, least) for better, worse in pairwise(finals[: num + 1])]
    result = []
    for shape in SHAPES:
        total = sum(each * i ** (1 + shape) for i, each in enumerate(spacings, start=1))
        log_weight = (1 + shape) * math.log(math.factorial(num)) - num * math.log(total)
        result.append((shape, total, log_weight))
    most = max(log_weight for _, _, log_weight in result)
    return [
        _Tail(shape=shape, total=total, num=num, weight=math.exp(log_weight - most))
        for shape, total, log_weight in result
    ]


def _predicted(trial: OpenTrial, ended: Iterable[EndedTrial]) -> tuple[float, float, int] | None:
    """Returns the mean, the deviation and the degrees of freedom of the prediction of a trial's final score.

    None where its learning curve does not predict it better than the mean of the others.
    """
    step = max(trial.scores, default=0)
    pairs = [(t.scores[step], t.final) for t in ended if t.final is not None and step in t.scores]
    if trial.goal < trial.total or len(pairs) < MIN_PAIRS or not math.isfinite(trial.scores.get(step, math.nan)):
        return None
    changes, finals = [final - score for score, final in pairs], [final for _, final in pairs]
    deviation = statistics.stdev(changes)
    # Errors of leaving one out are n / (n - 1) times the distances from the mean, for both: deviations compare them.
    if deviation >= statistics.stdev(finals):
        return None
    num = len(pairs)
    return trial.scores[step] + statistics.fmean(changes), deviation * math.sqrt(1 + 1 / num), num - 1
