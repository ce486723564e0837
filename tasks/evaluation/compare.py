"""Comparison of two models by one metric; a value that is not finite is never better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ringmaster.techniques.metric import metric_named


def gain(challenger: float, champion: float, *, metric: str) -> float:
    """Returns by how much the challenger is better, in the metric's unit; negative if it is worse.

    Returns NaN if either value is not finite. Raises ValueError on an unknown metric.
    """
    is_high_good = metric_named(metric).higher_is_better
    if not (math.isfinite(challenger) and math.isfinite(champion)):
        return math.nan
    return challenger - champion if is_high_good else champion - challenger


def ranked(values: Mapping[str, float], *, metric: str) -> list[str]:
    """Returns the names of `values`, the best first; those without a finite value come last, ties keep their order."""
    finite = [name for name in values if math.isfinite(values[name])]
    finite.sort(key=lambda name: gain(values[name], 0.0, metric=metric), reverse=True)
    return [*finite, *_others(values, finite)]


def _others(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    known = set(taken)
    return [name for name in names if name not in known]
