"""F1, the harmonic mean of precision and recall (van Rijsbergen, Information Retrieval, 1979, chapter 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmaster.techniques.metrics.class_counts import MACRO, MAX_CLASSES, MICRO, WEIGHTED, ClassCounts, ratio

if TYPE_CHECKING:
    from ringmaster.techniques.metric import Values


class F1(ClassCounts):
    """2 tp / (2 tp + fp + fn): of class 1 with two classes, else the mean over classes. For one prediction a row."""

    name = "f1"

    def score(self, hits: Values, predicted: Values, actual: Values) -> Values:
        """Returns 2 tp / (predicted + actual)."""
        return ratio(2 * hits, predicted + actual)


class F1Macro(F1):
    """The mean of F1 over classes, with two classes, too."""

    name = "f1_macro"
    average = MACRO
    sums = ("true_positives", "predicted_positives", "actual_positives", "multi_labelled")
    needs = f"labels of classes, and a logit for each of 2 to {MAX_CLASSES} classes"


class F1Micro(F1Macro):
    """F1 of the counts of all classes together. Where one class is right, this is the accuracy."""

    name = "f1_micro"
    average = MICRO


class F1Weighted(F1Macro):
    """The mean of F1 over classes, weighted by how many labels each class has."""

    name = "f1_weighted"
    average = WEIGHTED
