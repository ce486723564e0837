"""Comparison of trials at a rung whose held-out rows are computed part by part, until their places are certain.

All trials compute the same rows in one random order. Two of them are compared by the differences of what their rows
contribute to the metric, row by row, which vary less than the contributions themselves.

With n of N rows, drawn without replacement, differences of mean d and standard deviation s, and the error a, it is
certain that the first of two trials is the better one where

    d > s / sqrt(t) * sqrt((n - 1) (g - 1) / (1 - g / c)) * (1 + 5 v / n)
    t = n N / (N - n),  c = 1 + t k,  g = (sqrt(c) / 2a)^(2/n)

and where n = N. This is the confidence sequence of Wang and Ramdas, "Anytime-valid t-tests and confidence sequences
for Gaussian means with unknown variance" (arXiv:2310.03722, 2023), with a normal prior of variance k on the effect
size, of which one side can be wrong. It holds at all n at once, so that it may be looked at after each part. t is the
number of rows that, drawn with replacement, have the variance of n rows drawn without (Serfling, 1974).

It is exact for normal differences, and holds asymptotically for others (Waudby-Smith et al., "Time-uniform central
limit theory and asymptotic confidence sequences", arXiv:2103.06476, 2021). Where few rows decide the mean, it is wrong
too often: rows far below the mean difference, which would take the first trial's lead away, may be among those that
are not drawn yet. So the radius grows with v, the fourth moment of the differences below their mean, divided by the
squared variance. It is 1.5 for normal differences, and grows with n while rarer ones appear. Of 300 simulated choices
among trials whose rows are log-normal with sigma 1.5 and 2, which nearly tie, 1 was wrong at an error of 0.01; without
this term 15 were.

*Union.* A choice of the best k of m trials is wrong only if a pair with the true last one of the best, which is a fixed
trial, is: if that one is not chosen, some trial that is worse was called better; if it is, one that is better was
called worse. So the error of a whole choice is divided by m - 1, not by the number of pairs. A decision about single
trials before the others are certain can be wrong in any pair, and gets `EARLY` of the error, divided by all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ringmaster.features.rung_evaluation.row_parts import place_of
from ringmaster.techniques.job_specs import EvaluationSlice
from ringmaster.techniques.processes.gang_events import PartialEvaluation, RowValues

if TYPE_CHECKING:
    import numpy.typing as npt

    Values = npt.NDArray[np.float64]

FIRST_PART = 1 / 16
"""The share of the rows that each trial computes at a rung."""
SHARES = (*(k / 32 for k in range(3, 25)), 1.0)
"""The shares up to which further rows are requested: each request may be a start of a gang, and what would need more
than three quarters computes all."""
FORECAST = 0.8  # of the mean difference: the one that a further part is expected to show at least
EARLY = 0.25  # of the error: for decisions about single trials before all places are certain
TAIL_FACTOR = 5.0  # by which the radius grows with the share of the fourth moment in n
EFFECT_VARIANCE = 0.2  # k: shortest for effects of about a third of a standard deviation, as at the cuts of our curves


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedRows:
    """The first rows of the order, of a trial at a step.

    values, counts: what each contributes to the metric's sums, [rows]; higher values are better.
    whole: the number of rows of a whole evaluation.
    """

    values: Values
    counts: Values
    whole: int

    @property
    def is_whole(self) -> bool:
        """Whether all rows are there."""
        return len(self.values) >= self.whole

    @property
    def mean(self) -> float:
        """The metric, of these rows alone."""
        total = float(self.counts.sum())
        return float(self.values.sum()) / total if total else math.nan


@lru_cache(maxsize=4096)
def relative_radius(num_rows: int, whole: int, *, error: float) -> float:
    """Returns the radius of the confidence sequence, divided by the standard deviation; see the module's docstring.

    It is infinite where `num_rows` are too few for any statement, and 0 where they are all.

    error: the probability that the mean of all rows is ever outside, on either side.
    """
    if num_rows >= whole:
        return 0.0
    if num_rows < 2:
        return math.inf
    rows = num_rows * whole / (whole - num_rows)
    ratio = 1.0 + rows * EFFECT_VARIANCE
    exponent = (0.5 * math.log(ratio) - math.log(error)) * 2.0 / num_rows
    if exponent >= math.log(ratio):
        return math.inf
    bound = math.exp(exponent)
    return math.sqrt((num_rows - 1) * (bound - 1.0) / (1.0 - bound / ratio) / rows)


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """The comparison of the trials that have come to a rung by the values of their rows.

    scores: of each, higher is better; of a trial with a part of the rows, of that part.
    rows: of those that report them; a trial without was evaluated on all rows.
    may_go_on: the trials that can be evaluated further: they are at the rung.
    error: the probability that any choice at this rung is not that by all rows.
    num_trials: of the sweep, any of which may come to the rung.
    """

    scores: Mapping[str, float]
    rows: Mapping[str, EvaluatedRows]
    may_go_on: frozenset[str]
    error: float
    num_trials: int

    @cached_property
    def estimates(self) -> Mapping[str, float]:
        """The scores of all rows, estimated by the differences from the trial with most rows."""
        if not self.rows:
            return self.scores
        finite = [each for each in self.rows.values() if math.isfinite(each.mean)]  # of a diverged trial, none is
        pivot = max(finite, key=lambda each: len(each.values), default=None)
        if pivot is None:
            return self.scores
        result = dict(self.scores)
        for name, own in self.rows.items():
            num = len(own.values)
            is_alike = num <= len(pivot.values) and np.array_equal(own.counts, pivot.counts[:num])
            if math.isfinite(self.scores[name]) and is_alike and own.counts.sum() > 0:
                result[name] = pivot.mean + float((own.values - pivot.values[:num]).sum() / own.counts.sum())
        return result

    def open_parts(self, order: Sequence[str], *, num_kept: int, is_early: bool) -> dict[str, float]:
        """Returns the shares of the rows up to which trials are to be evaluated, so that it is certain who is kept.

        The result has every trial whose place is not certain, as far as further rows can make it so.

        order: the trials by their estimates, of which the first `num_kept` are kept.
        is_early: whether trials are decided one by one; else only together, once the result is empty.
        """
        result: dict[str, float] = {}
        if not self.rows:
            return {}
        finite = [name for name in order if math.isfinite(self.scores[name])]
        if is_early:
            error = self.error * EARLY / max(1, math.comb(self.num_trials, 2))
        else:
            error = self.error * (1.0 - EARLY) / max(1, len(finite) - 1)
        for better in finite[:num_kept]:
            for worse in finite[num_kept:]:
                share = self._open_share(better, worse, error=error)
                if share is None or not any(self._can_reach(name, share) for name in (better, worse)):
                    continue
                for name in (better, worse):
                    result[name] = max(result.get(name, 0.0), share)
        return result

    def part_up_to(self, name: str, share: float, *, step: int, seed: int) -> EvaluationSlice | None:
        """Returns the part that a trial lacks up to a share of the rows; None where it lacks none, or cannot go on."""
        if not self._can_reach(name, share):
            return None
        own = self.rows[name]
        return EvaluationSlice(step=step, begin=len(own.values) / own.whole, end=share, seed=seed)

    def _can_reach(self, name: str, share: float) -> bool:
        own = self.rows.get(name)
        return own is not None and name in self.may_go_on and len(own.values) < place_of(share, own.whole)

    def _open_share(self, better: str, worse: str, *, error: float) -> float | None:
        """Returns the share of the rows after which the order of two trials may be certain; None where it is."""
        one, other = self.rows.get(better), self.rows.get(worse)
        if one is None or other is None:
            return None if (one is None or one.is_whole) and (other is None or other.is_whole) else 1.0
        num, whole = min(len(one.values), len(other.values)), one.whole
        if num >= whole == other.whole:
            return None
        moments = moments_of(one, other)
        if moments is None:
            return None if one.is_whole and other.is_whole else 1.0
        if moments.is_certain(num, whole, error=error):
            return None
        forecast = replace(moments, mean=FORECAST * abs(moments.mean))
        return next(
            (
                share
                for share in SHARES
                if (following := place_of(share, whole)) > num and forecast.is_certain(following, whole, error=error)
            ),
            1.0,
        )


@dataclass(frozen=True, kw_only=True)
class DifferenceMoments:
    """Moments of the differences of two trials' rows.

    deviation: their standard deviation. tail: the fourth moment of those below the mean, by the squared variance.
    """

    mean: float
    deviation: float
    tail: float

    def is_certain(self, num_rows: int, whole: int, *, error: float) -> bool:
        """Returns whether so many rows with these moments show that the first trial is the better one."""
        if num_rows >= whole:
            return True
        radius = relative_radius(num_rows, whole, error=min(0.5, 2.0 * error))
        return self.mean > self.deviation * radius * (1.0 + TAIL_FACTOR * self.tail / num_rows)


@lru_cache(maxsize=4096)
def moments_of(one: EvaluatedRows, other: EvaluatedRows) -> DifferenceMoments | None:
    """Returns the moments of the differences of the rows that two trials have; None where these are not the same rows.

    They have two rows or more.
    """
    num = min(len(one.values), len(other.values))
    if one.whole != other.whole or not np.array_equal(one.counts[:num], other.counts[:num]):
        return None
    differences = one.values[:num] - other.values[:num]
    mean = float(differences.mean())
    squares = (differences - mean) ** 2
    total = float(squares.sum())
    below = squares[differences < mean]
    tail = float((below * below).sum()) * num / total**2 if total > 0 else math.inf
    return DifferenceMoments(mean=mean, deviation=math.sqrt(total / max(1, num - 1)), tail=tail)


def merged(rows: EvaluatedRows | None, part: PartialEvaluation, *, sign: float) -> EvaluatedRows | None:
    """Returns the rows of a trial with a further part; None where the part does not follow them.

    sign: -1 for a metric of which lower values are better.
    """
    values, counts = sign * np.asarray(part.rows.values), np.asarray(part.rows.counts)
    if part.begin == 0 and rows is None:
        return EvaluatedRows(values=values, counts=counts, whole=part.whole)
    if rows is None or part.whole != rows.whole or not part.begin <= len(rows.values) < part.begin + len(values):
        return None
    num_known = len(rows.values) - part.begin
    values, counts = values[num_known:], counts[num_known:]
    return EvaluatedRows(
        values=np.concatenate([rows.values, values]), counts=np.concatenate([rows.counts, counts]), whole=rows.whole
    )


def as_part(rows: EvaluatedRows, *, sign: float) -> PartialEvaluation:
    """Returns the rows of a trial as one part, with the values of the metric."""
    values = RowValues(values=tuple((sign * rows.values).tolist()), counts=tuple(rows.counts.tolist()))
    return PartialEvaluation(begin=0, whole=rows.whole, rows=values)
