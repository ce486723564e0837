"""Non-dominated sorting of points, of which higher values are better, and the crowding distance within a front.

Deb et al. (2002), "A fast and elitist multiobjective genetic algorithm: NSGA-II". A point dominates another one if it
is as good in all values and better in one. The first front has the points that no other one dominates; the second front
those that only points of the first one dominate; and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Point = Sequence[float]


def front_numbers(points: Sequence[Point]) -> list[int]:
    """Returns the number of the front of each point, from 1."""
    if not points:
        return []
    values = np.asarray(points, dtype=np.float64)
    is_as_good = np.all(values[:, None] >= values[None], axis=2)
    dominates = np.asarray(is_as_good & np.any(values[:, None] > values[None], axis=2))
    numbers, left, number = np.zeros(len(values), dtype=int), np.ones(len(values), dtype=bool), 0
    while left.any():
        number += 1
        front = left & ~dominates[left].any(axis=0)
        numbers[front] = number
        left &= ~front
    return [int(each) for each in numbers]


def crowding_distances(points: Sequence[Point]) -> list[float]:
    """Returns the crowding distance of each point of one front: the sides of the box between its neighbours.

    Each side is a share of the range of its values. The ends of a range have an infinite distance.
    """
    result = [0.0] * len(points)
    for axis in range(len(points[0]) if points else 0):
        order = sorted(range(len(points)), key=lambda i: points[i][axis])
        low, high = points[order[0]][axis], points[order[-1]][axis]
        result[order[0]] = result[order[-1]] = math.inf
        for before, i, after in zip(order, order[1:], order[2:], strict=False):
            if high > low:
                result[i] += (points[after][axis] - points[before][axis]) / (high - low)
    return result


def front_scores(points: Sequence[Point]) -> list[float]:
    """Returns a score of each point: higher for an earlier front and, within a front, for a less crowded point."""
    numbers, result = front_numbers(points), [0.0] * len(points)
    for number in set(numbers):
        front = [i for i, each in enumerate(numbers) if each == number]
        for i, distance in zip(front, crowding_distances([points[i] for i in front]), strict=True):
            share = 1.0 if math.isinf(distance) else distance / (1.0 + distance)
            result[i] = -number + 0.9 * share
    return result
