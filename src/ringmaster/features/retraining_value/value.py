"""Whether retraining pays: what another day of waiting is expected to cost, compared with what retraining costs.

The champion's metric is measured on the data of each run. Its *excess* is what it has risen above the value that a
model trained now would reach; a day of waiting costs `worth` times the excess, in money. Retraining costs `price`, and
the excess begins at 0 again. If a champion is replaced at age a, a day costs

    g(a) = (price / p + worth * rise * a^2 / 2) / a + changes * price / p

in the long run, where p is the share of candidates that are promoted, `rise` that of the excess in a day, and `changes`
the sudden changes in a day, after each of which it is replaced anyway. Waiting one more day lowers that average as long
as the day costs less than the least g, so a model is retrained on the first day that costs more. This is age
replacement (Barlow and Hunter, Optimum Preventive Maintenance Policies, Operations Research 8, 1960).

A measurement is noisy. The excess is taken from the level of the measurements since the last change, averaged over the
days on which that change may have been: the recursion over run lengths of Adams and MacKay (Bayesian Online Changepoint
Detection, 2007), for normal values around a level. Days before the last change are data of another *regime*. The window
of training data is the longest one that has none of them. Where even the shortest one has some, a model of today is
replaced as soon as it has none any more, and must pay until then.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, median

import numpy as np

HAZARD = 1 / 30
"""The probability of a change between two measurements, before any is seen."""
PRIOR_SIGMAS = 5.0
"""How far a new level is expected from the first one at least, in standard deviations of a measurement."""
PRIOR_DAYS = 10.0
"""Days without a rise that count beside the measured ones, so that the first few decide little."""
COVERAGE = 0.9
MAD_SIGMA = 1.4826
"""The standard deviation of a normal distribution whose median absolute deviation is 1."""
TINY = 1e-9


@dataclass(frozen=True, kw_only=True)
class MetricMeasurement:
    """A mean over the rows of one run, smaller is better. day: counted from any date; stderr: the standard error."""

    day: int
    value: float
    stderr: float


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """What one run has measured.

    champion: the champion's metric.
    candidate: the metric on the same rows of the model that the run trained; None if it trained none.
    is_promoted: whether the candidate has become the champion.
    window_days: the days of data that the candidate was trained on; None for all there were.
    """

    champion: MetricMeasurement | None = None
    candidate: MetricMeasurement | None = None
    is_promoted: bool = False
    window_days: int | None = None


@dataclass(frozen=True, kw_only=True)
class ValueTerms:
    """The terms of the decision.

    price: of one training, in money.
    worth: the money that one unit of the metric costs in a day.
    horizon_days: after how many days retraining must have paid at the latest.
    windows: the days of training data to choose from, ascending; empty if there is no choice.
    """

    price: float
    worth: float
    horizon_days: int = 90
    windows: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ValueDecision:
    """Whether retraining pays today.

    waiting_cost: of one more day, in money; the interval covers it with probability `COVERAGE`.
    break_even_cost: of a day, above which retraining pays.
    interval_days: between two trainings in the long run, by the rise between changes so far.
    excess, rise: of the metric today, and in a day.
    window_days: of data to train on; None if there is no choice.
    """

    is_due: bool
    waiting_cost: float
    waiting_cost_low: float
    waiting_cost_high: float
    break_even_cost: float
    interval_days: int
    excess: float
    rise: float
    window_days: int | None = None

    def forecast(self, days: int) -> float:
        """Returns the excess expected after some days without retraining."""
        return self.excess + self.rise * days

    @property
    def why(self) -> str:
        """The decision in one sentence."""
        costs = f"waiting costs {self.waiting_cost:.3g} a day"
        interval = f"({self.waiting_cost_low:.3g} to {self.waiting_cost_high:.3g})"
        return f"{costs} {interval}, retraining pays from {self.break_even_cost:.3g} a day on"


@dataclass(frozen=True, kw_only=True)
class Level:
    """The level of the last of some measurements, with its standard deviation.

    changed_before_days: the days since the level began, the likeliest number; None if it did not change.
    """

    mean: float
    deviation: float
    changed_before_days: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tenure:
    """The time of one champion.

    measured: its metric, first on the day on which it was trained.
    attainable: the value that a model trained only on data of one regime would reach.
    regime_days: the days of the regime when it was trained; None if no change is known.
    gains: of each training so far, the expected and the realized one.
    num_rejected: of all candidates so far.
    """

    measured: tuple[MetricMeasurement, ...]
    attainable: float
    regime_days: int | None = None
    gains: tuple[tuple[float, float], ...] = ()
    num_rejected: int = 0

    def level(self, *, noise: float) -> Level:
        """Returns the level of its last measurement. noise: the standard deviation of a measurement, at least."""
        return level_of(self.measured, noise=noise)

    def days_of_regime(self, level: Level) -> float:
        """Returns the days of the current regime; infinite if no change is known."""
        if level.changed_before_days is not None:
            return level.changed_before_days
        if self.regime_days is None:
            return math.inf
        return self.regime_days + self.measured[-1].day - self.measured[0].day


def decide(observations: Sequence[RunObservation], terms: ValueTerms) -> ValueDecision | None:
    """Returns whether retraining pays on the day of the last observation; None before a champion was measured."""
    tenures = tenures_of(observations)
    if not tenures:
        return None
    now, noise = tenures[-1], noise_of(tenures)
    level = now.level(noise=noise)
    regime_days = now.days_of_regime(level)
    # Of the days that the shortest window has, those before the change keep a model from what is attainable: the
    # error of a mean of two values grows with the square of the share of the wrong one.
    foreign = max(0.0, 1 - regime_days / terms.windows[0]) if terms.windows else 0.0
    realized = realized_share(now.gains)
    excess = realized * (level.mean - now.attainable) * (1 - foreign**2)
    rise, changes = changes_of(tenures, noise=noise)
    promoted = len(tenures) / (len(tenures) + now.num_rejected)
    price = terms.price / promoted
    interval_days, break_even = cheapest_age(rise, replace(terms, price=price))
    break_even += price * changes
    if foreign:  # a model of today is replaced once the shortest window is of one regime
        break_even = max(break_even, price / (terms.windows[0] - regime_days))
    cost = terms.worth * (excess + rise / 2)
    reach = terms.worth * realized * level.deviation * NormalDist().inv_cdf((1 + COVERAGE) / 2)
    return ValueDecision(
        is_due=cost >= break_even,
        waiting_cost=cost,
        waiting_cost_low=cost - reach,
        waiting_cost_high=cost + reach,
        break_even_cost=break_even,
        interval_days=interval_days,
        excess=excess,
        rise=rise,
        window_days=_window(terms.windows, regime_days),
    )


def tenures_of(observations: Sequence[RunObservation]) -> tuple[Tenure, ...]:
    """Returns the tenures of all champions, from what each run has measured, the oldest first."""
    tenures: list[Tenure] = []
    for seen in observations:
        if seen.champion is not None:
            if not tenures:
                tenures.append(Tenure(measured=(), attainable=seen.champion.value))
            tenures[-1] = replace(tenures[-1], measured=(*tenures[-1].measured, seen.champion))
        if seen.candidate is None:
            continue
        if not tenures or not tenures[-1].measured:
            tenures = [Tenure(measured=(seen.candidate,), attainable=seen.candidate.value)]
        elif seen.is_promoted:
            tenures.append(_successor(tenures, seen.candidate, window_days=seen.window_days))
        else:
            tenures[-1] = _rejecting(tenures, seen.candidate)
    return tuple(tenures)


def _successor(tenures: Sequence[Tenure], first: MetricMeasurement, *, window_days: int | None) -> Tenure:
    """Returns the tenure that begins with a promoted candidate."""
    last, noise = tenures[-1], noise_of(tenures)
    days = last.days_of_regime(last.level(noise=noise))
    is_pure = days >= (window_days or 0)
    return Tenure(
        measured=(first,),
        attainable=first.value if is_pure else min(first.value, last.attainable),
        regime_days=None if math.isinf(days) else int(days),
        gains=(*last.gains, _gain(last, first, noise=noise)),
        num_rejected=last.num_rejected,
    )


def _rejecting(tenures: Sequence[Tenure], candidate: MetricMeasurement) -> Tenure:
    """Returns the last tenure after a candidate that was not promoted: no more than its value is attainable now.

    A candidate that is worse than the champion, such as a diverged one, shows no more than that nothing was gained.
    """
    last = tenures[-1]
    gain = _gain(last, candidate, noise=noise_of(tenures))
    attainable = min(candidate.value, last.measured[-1].value)
    return replace(last, attainable=attainable, gains=(*last.gains, gain), num_rejected=last.num_rejected + 1)


def _gain(tenure: Tenure, candidate: MetricMeasurement, *, noise: float) -> tuple[float, float]:
    """Returns by how much a candidate was expected to lower the metric, and by how much it has."""
    expected = tenure.level(noise=noise).mean - tenure.attainable
    return expected, max(tenure.measured[-1].value - candidate.value, 0.0)


def noise_of(tenures: Sequence[Tenure]) -> float:
    """Returns the standard deviation of a measurement around its level, by the median step between two measurements.

    Few steps are changes of the level, so that the median ignores them.
    """
    steps = [abs(b.value - a.value) for tenure in tenures for a, b in pairwise(tenure.measured)]
    return MAD_SIGMA * median(steps) / math.sqrt(2) if steps else 0.0


@lru_cache(maxsize=256)
def level_of(measured: tuple[MetricMeasurement, ...], *, noise: float) -> Level:
    """Returns the level of the last measurement, averaged over the days on which it may have begun."""
    values = np.array([each.value for each in measured])
    variances = np.maximum([each.stderr for each in measured], max(noise, TINY)) ** 2
    prior_mean = values[0]
    prior_variance = max(float(np.ptp(values)), PRIOR_SIGMAS * math.sqrt(variances[0])) ** 2
    # By the measurement with which a level may have begun: the log of its probability, and the level given that.
    weights, means, precisions = np.zeros(0), np.zeros(0), np.zeros(0)
    for value, variance in zip(values, variances, strict=True):
        change = np.logaddexp.reduce(weights) + math.log(HAZARD) if len(weights) else 0.0
        weights = np.append(weights + math.log1p(-HAZARD), change)
        means, precisions = np.append(means, prior_mean), np.append(precisions, 1 / prior_variance)
        predicted = variance + 1 / precisions
        weights -= 0.5 * (np.log(predicted) + (value - means) ** 2 / predicted)
        means = (means * precisions + value / variance) / (precisions + 1 / variance)
        precisions = precisions + 1 / variance
    shares = np.exp(weights - np.logaddexp.reduce(weights))
    mean = float(shares @ means)
    likeliest = int(np.argmax(shares))
    return Level(
        mean=mean,
        deviation=math.sqrt(max(float(shares @ (1 / precisions + means**2)) - mean**2, 0.0)),
        changed_before_days=measured[-1].day - measured[likeliest].day + 1 if likeliest else None,
    )


def changes_of(tenures: Sequence[Tenure], *, noise: float) -> tuple[float, float]:
    """Returns by how much the excess rises in a day between changes, at least 0, and the changes in a day."""
    days = PRIOR_DAYS + sum(each.measured[-1].day - each.measured[0].day for each in tenures)
    rise, num_changes = 0.0, 0
    for tenure in tenures:
        level = tenure.level(noise=noise)
        if level.changed_before_days is None:
            rise += level.mean - tenure.measured[0].value
        else:
            num_changes += 1
    return max(rise, 0.0) / days, num_changes / days


def realized_share(gains: Sequence[tuple[float, float]]) -> float:
    """Returns the share of the expected gain that trainings realize, at most 1: least squares, with one of 1 before."""
    positive = [(expected, realized) for expected, realized in gains if expected > 0]
    if not positive:
        return 1.0
    squares = sum(expected**2 for expected, _ in positive)
    prior = squares / len(positive)
    return min((prior + sum(expected * realized for expected, realized in positive)) / (prior + squares), 1.0)


def cheapest_age(rise: float, terms: ValueTerms) -> tuple[int, float]:
    """Returns the age in days at which replacing a champion costs least in the long run, and the cost of a day then."""
    ages = np.arange(1, terms.horizon_days + 1)
    costs = (terms.price + terms.worth * rise * ages**2 / 2) / ages
    best = int(np.argmin(costs))
    return int(ages[best]), float(costs[best])


def _window(windows: Sequence[int], regime_days: float) -> int | None:
    if not windows:
        return None
    return max((each for each in windows if each <= regime_days), default=windows[0])
