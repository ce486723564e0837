"""Precision and recall."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmaster.techniques.metrics.class_counts import ClassCounts, ratio

if TYPE_CHECKING:
    from ringmaster.techniques.metric import Values


class Precision(ClassCounts):
    """The share of predictions of a class that are right: of class 1 with two classes, else the mean over classes."""

    name = "precision"

    def score(self, hits: Values, predicted: Values, actual: Values) -> Values:
        """Returns tp / predicted."""
        return ratio(hits, predicted)


class Recall(ClassCounts):
    """The share of labels of a class that are predicted: of class 1 with two classes, else the mean over classes."""

    name = "recall"

    def score(self, hits: Values, predicted: Values, actual: Values) -> Values:
        """Returns tp / actual."""
        return ratio(hits, actual)
