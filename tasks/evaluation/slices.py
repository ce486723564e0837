"""Metrics over all rows and over slices, with confidence intervals and a comparison with another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringmaster.tasks.evaluation.resampling import Rows, compare, estimate
from ringmaster.tasks.evaluation.scores import Scores
from ringmaster.tasks.evaluation.suite import SliceEntry

ALL = "all"

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One metric of one slice of the rows, or of all rows (slice "all").

    low, high: the interval that contains the metric with probability `level`.
    other: the metric of the model compared with.
    gain: the difference, positive if this model is better; gain_low, gain_high: its interval.
    p_better, p_worse: the probability of so large a gain (or loss) by chance.

    The fields of a comparison are None without one.
    """

    metric: str
    slice: str
    num_rows: int
    value: float
    low: float
    high: float
    level: float
    other: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    p_better: float | None = None
    p_worse: float | None = None


def measure(
    scores: Scores, other: Scores | None = None, *, metrics: Sequence[str], slices: Sequence[SliceEntry] = ()
) -> list[Measured]:
    """Returns every metric over all rows and over every slice.

    Raises ValueError if a slice does not apply to these rows, or if the two models have different numbers of rows.
    """
    masks = {ALL: np.ones(scores.num_rows, bool)} | {
        f"{entry.name}={value}": mask for entry in slices for value, mask in masks_of(entry, scores)
    }
    if other is not None and other.num_rows != scores.num_rows:
        raise ValueError(f"{scores.num_rows} rows cannot be compared with {other.num_rows}: give both the same data")
    found: list[Measured] = []
    for metric in metrics:
        own, others = scores.rows(metric), None if other is None else other.rows(metric)
        found += [_measured(own, others, metric, name, mask) for name, mask in masks.items()]
    return found


def masks_of(entry: SliceEntry, scores: Scores) -> Iterator[tuple[str, Mask]]:
    """Yields each slice's name and mask, [rows]."""
    if entry.tokens is not None:
        if scores.num_tokens is None:
            raise ValueError(f"slice {entry.name}: the rows are no texts. To fix: name a column or a function")
        edges = [0, *entry.tokens]
        for low, high in zip(edges, [*entry.tokens, None], strict=True):
            mask = scores.num_tokens >= low
            name = f">={low}" if high is None else f"{low}-{high - 1}"
            if high is not None:
                mask &= scores.num_tokens < high
            if mask.any():
                yield name, mask
        return
    named: Mapping[str, npt.NDArray[np.generic]] = scores.columns if entry.column is not None else scores.slices
    key = entry.column if entry.column is not None else entry.name
    if key not in named:
        there = ", ".join(sorted(scores.columns)) or "none"
        raise ValueError(f"slice {entry.name}: the rows have no column {key}. To fix: name one of these: {there}")
    for value in np.unique(named[key]):
        yield str(value), named[key] == value


def _measured(own: Rows, other: Rows | None, metric: str, name: str, mask: Mask) -> Measured:
    rows = own.where(mask)
    told = estimate(rows)
    if other is None:
        return Measured(metric=metric, slice=name, **vars(told))
    others = other.where(mask)
    found = compare(rows, others)
    return Measured(
        metric=metric,
        slice=name,
        **vars(told),
        other=others.value,
        gain=found.gain,
        gain_low=found.low,
        gain_high=found.high,
        p_better=found.p_better,
        p_worse=found.p_worse,
    )
