"""How sure a metric is, and a difference between two models on the same rows: bootstrap, with numpy alone.

A metric is a ratio of sums over rows: of losses over tokens, of hits over labels. Rows are drawn anew with replacement,
the same ones for both models (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapters 13 and 16), so what
makes a row hard for both cancels out.

Rows that are all right, or all wrong, are the same however they are drawn: there a bootstrap's interval has no width.
Wilson's takes its place (Probable Inference, the Law of Succession, and Statistical Inference, JASA 22, 1927), with the
rows as trials: of n rows without an error the true share of errors is at most z^2 / (n + z^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

NUM_DRAWS = 2000
CHUNK = 4_000_000  # counts drawn at a time

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rows:
    """What each row adds to a metric: it is `of(sum(sums) / sum(counts))`.

    sums, counts: [rows]. of: what the ratio is made into, for example exp for a perplexity; rising.
    is_share: whether it is a share, of hits among what is counted.
    """

    sums: Values
    counts: Values
    of: Callable[[Values], Values] = lambda ratio: ratio
    is_share: bool = False

    def __post_init__(self) -> None:
        if self.sums.shape != self.counts.shape or self.sums.ndim != 1:
            raise ValueError(f"sums {self.sums.shape} and counts {self.counts.shape} are not of the same rows")

    def __len__(self) -> int:
        return len(self.sums)

    @property
    def value(self) -> float:
        """The metric over all rows; not a number where nothing was counted."""
        total = float(self.counts.sum())
        return float(self.of(np.asarray(self.sums.sum() / total))) if total else math.nan

    def where(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """The rows of a slice. mask: [rows]."""
        return Rows(self.sums[mask], self.counts[mask], self.of, self.is_share)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric and the interval that it lies in with probability `level`, as far as the rows tell."""

    value: float
    low: float
    high: float
    level: float
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """By how much one model is better than another on the same rows.

    gain: positive where it is better. low, high: its interval. p_better: the probability of a gain like this one, or a
    larger one, if there were none (one-sided, at least 1 / (draws + 1), and at least 0.5^n of n rows that differ).
    p_worse: likewise for a loss.
    """

    gain: float
    low: float
    high: float
    p_better: float
    p_worse: float
    num_rows: int


def estimate(rows: Rows, *, level: float = 0.95, num_draws: int = NUM_DRAWS, seed: int = 0) -> Estimate:
    """A metric with its percentile interval; a share of 0 or 1 with Wilson's. Not numbers where no row counts."""
    if rows.is_share and rows.value in (0.0, 1.0):
        most = unseen(int(np.count_nonzero(rows.counts)), level=level)
        low, high = (0.0, most) if rows.value == 0.0 else (1.0 - most, 1.0)
        return Estimate(value=rows.value, low=low, high=high, level=level, num_rows=len(rows))
    drawn = _joined(_drawn(rows, counts) for counts in _draws(len(rows), num_draws, seed))
    low, high = _quantiles(drawn, level)
    return Estimate(value=rows.value, low=low, high=high, level=level, num_rows=len(rows))


def compare(
    model: Rows,
    other: Rows,
    *,
    higher_is_better: bool,
    level: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> Comparison:
    """A model against another one on the same rows, in the same order. Raises ValueError where they are not as many."""
    if len(model) != len(other):
        raise ValueError(f"{len(model)} rows cannot be compared with {len(other)}: give both models the same data")
    sign = 1.0 if higher_is_better else -1.0
    gain = sign * (model.value - other.value)
    drawn = _joined(sign * (_drawn(model, c) - _drawn(other, c)) for c in _draws(len(model), num_draws, seed))
    low, high = _quantiles(drawn, level)
    if model.is_share and np.array_equal(model.sums, other.sums) and (num_rows := int(np.count_nonzero(model.counts))):
        high = unseen(num_rows, level=level)  # on no row do they differ, which says as much as no errors do
        low = -high
    least = _least_p(model, other)
    return Comparison(
        gain=gain,
        low=low,
        high=high,
        p_better=max(_share(drawn <= 0), least) if math.isfinite(gain) else 1.0,
        p_worse=max(_share(drawn >= 0), least) if math.isfinite(gain) else 1.0,
        num_rows=len(model),
    )


def unseen(num_rows: int, *, level: float) -> float:
    """The largest share of something that was seen in none of `num_rows` rows, at `level`: Wilson's upper bound."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    return z * z / (num_rows + z * z)


def _least_p(model: Rows, other: Rows) -> float:
    """What n rows that differ can say at the most: that all of them gained has probability 0.5^n where nothing did.

    A bootstrap knows no rows but these, and is sure of a gain that all of them share, were it one row alone.
    """
    num_different = np.count_nonzero((model.sums != other.sums) | (model.counts != other.counts))
    return float(0.5**num_different)


def _draws(num_rows: int, num_draws: int, seed: int) -> Iterator[Values]:
    """How often each row is drawn: [draws, rows] in pieces."""
    generator = np.random.default_rng(seed)
    left = num_draws if num_rows else 0
    while left:
        size = min(left, max(1, CHUNK // num_rows))
        yield generator.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=size).astype(np.float64)
        left -= size


def _drawn(rows: Rows, counts: Values) -> Values:
    with np.errstate(invalid="ignore", divide="ignore"):  # a draw of rows that count for nothing says nothing
        return rows.of((counts @ rows.sums) / (counts @ rows.counts))


def _joined(parts: Iterable[Values]) -> Values:
    """All draws that say something."""
    drawn: Values = np.concatenate([np.zeros(0), *parts])
    finite: Values = drawn[np.isfinite(drawn)]
    return finite


def _quantiles(drawn: Values, level: float) -> tuple[float, float]:
    if not len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _share(hits: npt.NDArray[np.bool_]) -> float:
    return (int(hits.sum()) + 1) / (len(hits) + 1)
