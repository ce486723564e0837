"""Bootstrap confidence intervals of a metric, and of the difference of two models on the same rows, with numpy alone.

A metric is a function of sums over rows, such as a ratio of hits and labels, or of the order of all rows. Rows are
resampled with replacement, the same ones for both models (Efron & Tibshirani, An Introduction to the Bootstrap, 1993,
chapters 13 and 16), so the difficulty of a row for both models cancels out.

If all rows are right, or all are wrong, every resample is equal and the bootstrap interval has no width. Wilson's
interval replaces it (Probable Inference, the Law of Succession, and Statistical Inference, JASA 22, 1927), with the
rows as trials: for n rows without an error, the true error rate is at most z^2 / (n + z^2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ringmaster.techniques.metric import GatheredMetric, Metric

NUM_DRAWS = 2000
CHUNK = 4_000_000  # the most counts drawn at a time

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MetricRows:
    """The contribution of each row to the sums of a metric: [rows] or [rows, k] each, by the sum's name.

    Of a `GatheredMetric`, the values that its `relate` returns.
    """

    metric: Metric
    sums: Mapping[str, Values]

    def __post_init__(self) -> None:
        if len({len(values) for values in self.sums.values()}) != 1:
            shapes = ", ".join(str(values.shape) for values in self.sums.values())
            raise ValueError(f"sums of the shapes {shapes} are not of the same rows")

    def __len__(self) -> int:
        return len(next(iter(self.sums.values())))

    @property
    def value(self) -> float:
        """The metric over all rows; NaN if nothing was counted."""
        if not len(self):
            return math.nan
        if isinstance(self.metric, GatheredMetric):
            return float(self.drawn(np.ones(len(self))))
        return float(self._value({name: values.sum(axis=0) for name, values in self.sums.items()}))

    @property
    def by_row(self) -> Values:
        """The metric of each row alone, [rows]; NaN if nothing was counted in it. Not of a metric of all rows."""
        assert not isinstance(self.metric, GatheredMetric), "one row has no such metric"
        return self._value(self.sums)

    @property
    def num_counted(self) -> int:
        """The number of rows with counted elements, for a metric that is a share of them; else 0."""
        share_of = self.metric.share_of
        return 0 if share_of is None else int(np.count_nonzero(self.sums[share_of]))

    def drawn(self, counts: Values) -> Values:
        """Returns the metric of samples of the rows. counts: how often a sample has each row, [samples, rows]."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.metric.value_of_rows(self.sums, counts)

    def where(self, mask: npt.NDArray[np.bool_]) -> MetricRows:
        """Returns the rows of a slice. mask: [rows]."""
        return MetricRows(self.metric, {name: values[mask] for name, values in self.sums.items()})

    def _value(self, sums: Mapping[str, Values]) -> Values:
        with np.errstate(invalid="ignore", divide="ignore"):  # of nothing that is counted, the metric is NaN
            return self.metric.value(sums)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric, and the interval that contains it with probability `level` according to the rows."""

    value: float
    low: float
    high: float
    level: float
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """By how much one model is better than another on the same rows.

    gain: the difference in the metric; positive if the model is better.
    low, high: the confidence interval of the gain.
    p_better: the one-sided probability of at least this gain if there were none; at least 1 / (draws + 1), and at least
        0.5^n if n rows differ.
    p_worse: likewise for a loss.
    """

    gain: float
    low: float
    high: float
    p_better: float
    p_worse: float


def estimate(rows: MetricRows, *, level: float = 0.95, num_draws: int = NUM_DRAWS, seed: int = 0) -> Estimate:
    """Returns a metric with its percentile interval, or Wilson's for a share of 0 or 1; NaN without counted rows."""
    if rows.num_counted and rows.value in (0.0, 1.0):
        most = unseen(rows.num_counted, level=level)
        low, high = (0.0, most) if rows.value == 0.0 else (1.0 - most, 1.0)
        return Estimate(value=rows.value, low=low, high=high, level=level, num_rows=len(rows))
    drawn = _joined(rows.drawn(counts) for counts in _draws(len(rows), num_draws, seed))
    low, high = _quantiles(drawn, level)
    return Estimate(value=rows.value, low=low, high=high, level=level, num_rows=len(rows))


def compare(
    model: MetricRows,
    other: MetricRows,
    *,
    level: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> Comparison:
    """Compares two models on the same rows, in the same order. Raises ValueError if their numbers of rows differ."""
    if len(model) != len(other):
        raise ValueError(f"{len(model)} rows cannot be compared with {len(other)}: give both models the same data")
    sign = 1.0 if model.metric.higher_is_better else -1.0
    gain = sign * (model.value - other.value)
    drawn = _joined(sign * (model.drawn(c) - other.drawn(c)) for c in _draws(len(model), num_draws, seed))
    low, high = _quantiles(drawn, level)
    num_different = np.count_nonzero(np.any([_differ(v, other.sums[name]) for name, v in model.sums.items()], axis=0))
    if model.num_counted and not num_different:
        high = unseen(model.num_counted, level=level)  # no row differs: the same evidence as no errors
        low = -high
    # The smallest p-value that n differing rows support: without an effect, all gain with probability 0.5^n. A
    # bootstrap resamples only these rows, so it would be certain of a gain that all of them share, even of one row.
    least = float(0.5**num_different)
    return Comparison(
        gain=gain,
        low=low,
        high=high,
        p_better=max(_share(drawn <= 0), least) if math.isfinite(gain) else 1.0,
        p_worse=max(_share(drawn >= 0), least) if math.isfinite(gain) else 1.0,
    )


def unseen(num_rows: int, *, level: float) -> float:
    """Returns Wilson's upper bound, at `level`, on the share of an event that occurred in none of `num_rows` rows."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    return z * z / (num_rows + z * z)


def _draws(num_rows: int, num_draws: int, seed: int) -> Iterator[Values]:
    """Yields how often each row is drawn, as chunks of [draws, rows]."""
    generator = np.random.default_rng(seed)
    left = num_draws if num_rows else 0
    while left:
        size = min(left, max(1, CHUNK // num_rows))
        yield generator.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=size).astype(np.float64)
        left -= size


def _joined(parts: Iterable[Values]) -> Values:
    """Returns the finite values of all draws."""
    drawn: Values = np.concatenate([np.zeros(0), *parts])
    finite: Values = drawn[np.isfinite(drawn)]
    return finite


def _differ(one: Values, other: Values) -> npt.NDArray[np.bool_]:
    """Returns which rows differ, [rows]; rows without a value are equal."""
    differ = (one != other) & ~(np.isnan(one) & np.isnan(other))
    return np.asarray(differ.any(axis=1) if differ.ndim > 1 else differ)


def _quantiles(drawn: Values, level: float) -> tuple[float, float]:
    if not len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _share(hits: npt.NDArray[np.bool_]) -> float:
    return (int(hits.sum()) + 1) / (len(hits) + 1)
