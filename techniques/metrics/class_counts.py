"""Counts of predictions by class, which precision, recall and F1 share: as scikit-learn's with zero_division=0."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringmaster.techniques.metric import IGNORED, Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values

MAX_CLASSES = 4096  # beyond, counts by class take more memory than the model's outputs; such classes are words
BINARY, MACRO, MICRO, WEIGHTED = "binary", "macro", "micro", "weighted"


def is_multi_label(outputs: Outputs) -> bool:
    """Whether the labels are a number from 0 to 1 for each class and row: several classes may be right."""
    logits, labels = outputs.logits, outputs.labels
    if logits is None or labels is None or logits.shape != labels.shape:
        return False
    return labels.is_floating_point() and logits.shape[-1] > 1


def is_single_label(outputs: Outputs) -> bool:
    """Whether the labels are a class of each row, or of each position in it."""
    logits, labels = outputs.logits, outputs.labels
    if logits is None or labels is None or logits.shape[:-1] != labels.shape:
        return False
    return logits.shape[-1] > 1 and not labels.is_floating_point()


def class_counts(outputs: Outputs) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the true positives, the predicted and the actual positives of each row by class, [rows, classes] each.

    Single-label: the class with the largest logit is predicted. Multi-label: each class whose logit is positive, so
    whose probability is above 0.5. Returns None without class labels.
    """
    import torch

    logits, labels = outputs.logits, outputs.labels
    if logits is None or labels is None or logits.shape[-1] > MAX_CLASSES:
        return None
    if is_multi_label(outputs):
        predicted, actual = logits > 0, labels > 0.5
    elif is_single_label(outputs):
        classes = torch.arange(logits.shape[-1], device=logits.device)
        counted = (labels != IGNORED)[..., None]
        predicted, actual = (each[..., None] == classes for each in (logits.argmax(-1), labels))
        predicted, actual = predicted & counted, actual & counted
    else:
        return None
    shape = (len(labels), -1, logits.shape[-1])
    found = [each.reshape(shape).sum(1) for each in (predicted & actual, predicted, actual)]
    return found[0], found[1], found[2]


class ClassCounts(Metric):
    """A metric of counts by class, averaged over classes.

    average: the average, named as in scikit-learn. None stands for "binary" with two classes of which one is right (the
        positive class is 1), else "macro", the mean over classes, and for rows with one prediction only: of tokens, one
        class is usually "none", and what people mean is an average or entities. A class that is neither predicted nor
        right counts in a mean only where several classes may be right.
    """

    higher_is_better = True
    sums = ("row_true_positives", "row_predicted_positives", "row_actual_positives", "multi_labelled_rows")
    needs = (
        f"one prediction a row: labels of classes, and a logit for each of 2 to {MAX_CLASSES} classes. For tokens: "
        "entity_f1 (classes such as B-PER and I-PER), f1_macro or f1_micro"
    )
    average: ClassVar[str | None] = None

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns each row's counts by class, [rows, classes], and whether several classes may be right, [rows]."""
        if outputs.logits is None or (self.average is None and outputs.logits.ndim != 2):
            return None
        if (counts := class_counts(outputs)) is None:
            return None
        flags = counts[0][:, 0] * 0 + int(is_multi_label(outputs))
        return dict(zip(self.sums, (*counts, flags), strict=True))

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the average over classes."""
        hits, predicted, actual, flags = (np.asarray(sums[name]) for name in self.sums)
        many = np.asarray(flags > 0)
        found = hits.sum(-1), predicted.sum(-1), actual.sum(-1)
        nothing = np.where((found[1] + found[2] == 0) & ~many, np.nan, 0.0)  # the metric of nothing is NaN
        micro = self.score(*found)
        if self.average == MICRO:
            return np.asarray(micro + nothing)
        by_class = self.score(hits, predicted, actual)
        weights = np.where((predicted + actual > 0) | many[..., None], 1.0, 0.0)
        if self.average == WEIGHTED:
            weights = actual
        value = share(by_class * weights, weights)
        if self.average is None and hits.shape[-1] == 2:
            value = np.where(many, value, by_class[..., 1])
        return np.asarray(value + nothing)

    @abstractmethod
    def score(self, hits: Values, predicted: Values, actual: Values) -> Values:
        """Returns the metric of counts, of one shape."""


def ratio(numerator: Values, denominator: Values) -> Values:
    """Returns the ratio, and 0 where the denominator is 0."""
    return np.where(denominator == 0, 0.0, numerator / np.where(denominator == 0, 1.0, denominator))


def share(values: Values, weights: Values) -> Values:
    """Returns the sum of values by the sum of weights, over the last dimension."""
    return ratio(values.sum(-1), weights.sum(-1))
