"""Linear fit through a few measurements, which predicts the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """The line y = `fixed` + `slope` x."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        """Returns y at x."""
        return self.fixed + self.slope * x


def fitted(points: Sequence[Point], *, lone_slope: float) -> Line:
    """Returns the least-squares line of relative errors, with a slope and an intercept of at least zero.

    lone_slope: the slope of a line through a single point, or through points of one x. All y are positive.
    """
    xs = {x for x, _ in points}
    if len(xs) == 1:
        x, y = xs.pop(), sum(y for _, y in points) / len(points)
        slope = min(lone_slope, y / x) if x else lone_slope
        return Line(y - slope * x, slope)
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    xx = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    xy = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = max(xy / xx, 0.0)
    if (fixed := mean_y - slope * mean_x) >= 0:
        return Line(fixed, slope)
    through_zero = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
    return Line(0.0, through_zero / sum(w * x * x for w, (x, _) in zip(weights, points, strict=True)))
