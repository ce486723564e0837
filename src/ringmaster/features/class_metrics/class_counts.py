"""Metrics of classes: precision, recall, F1, the Matthews coefficient and AUROC.

Counts by class and their averages are as scikit-learn's with zero_division=0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringmaster.techniques.metric import IGNORED, GatheredMetric, Metric, Outputs
from ringmaster.techniques.metrics.classification import is_multi_label, is_single_label, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


MAX_CLASSES = 4096  # beyond, counts by class take more memory than the model's outputs; such classes are words
BINARY, MACRO, MICRO, WEIGHTED = "binary", "macro", "micro", "weighted"


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
    result = [each.reshape(shape).sum(1) for each in (predicted & actual, predicted, actual)]
    return result[0], result[1], result[2]


class ClassCounts(Metric):
    """A metric of counts by class, averaged over classes.

    average: the average, named as in scikit-learn. None means "binary" with two classes of which one is right (the
        positive class is 1), else "macro", the mean over classes, and for rows with one prediction only: of tokens, one
        class is usually "none", and what is meant is usually an average or entities. A class that is neither predicted
        nor right counts in a mean only where several classes may be right.
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
        result = hits.sum(-1), predicted.sum(-1), actual.sum(-1)
        nothing = np.where((result[1] + result[2] == 0) & ~many, np.nan, 0.0)  # the metric of nothing is NaN
        micro = self.score(*result)
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


def share(values: Values, weights: Values) -> Values:
    """Returns the sum of values by the sum of weights, over the last dimension."""
    return ratio(values.sum(-1), weights.sum(-1))


class F1(ClassCounts):
    """2 tp / (2 tp + fp + fn): of class 1 with two classes, else the mean over classes. For one prediction a row.

    The harmonic mean of precision and recall (van Rijsbergen, Information Retrieval, 1979, chapter 7).
    """

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


class Matthews(Metric):
    """The correlation of predicted and actual classes, from -1 to 1 (Gorodkin, 2004, equation 8).

    With s labels, c of them predicted, and p_k predictions and t_k labels of class k:
    (c s - sum p_k t_k) / sqrt((s^2 - sum p_k^2) (s^2 - sum t_k^2)), and 0 where the denominator is 0.
    """

    name = "matthews"
    higher_is_better = True
    sums = ("matthews_hits", "matthews_predicted", "matthews_actual")
    needs = f"one label of a class each, and a logit for each of 2 to {MAX_CLASSES} classes"

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the counts of each row by class, [rows, classes]; None where several classes may be right."""
        if not is_single_label(outputs) or (counts := class_counts(outputs)) is None:
            return None
        return dict(zip(self.sums, counts, strict=True))

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the coefficient."""
        hits, predicted, actual = (np.asarray(sums[name]) for name in self.sums)
        correct, total = hits.sum(-1), actual.sum(-1)
        covariance = correct * total - (predicted * actual).sum(-1)
        spread = (total**2 - (predicted**2).sum(-1)) * (total**2 - (actual**2).sum(-1))
        return np.asarray(np.where(total == 0, np.nan, ratio(covariance, np.sqrt(spread))))


class Auroc(GatheredMetric):
    """The probability that a row of a class has a larger score for it than a row of another class; ties count half.

    With two classes, the score of class 1. With more, the mean over the classes, each against all others, that have
    rows within and without it (Fawcett, An Introduction to ROC Analysis, 2006, sections 7 and 9.2).
    """

    name = "auroc"
    higher_is_better = True
    sums = ("class_scores", "class_targets")
    undefined_where = "the evaluated rows are all of one class"
    needs = "one prediction a row: logits [rows, classes], and labels of classes"

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the scores of each row and whether each class is right: [rows] for two classes, [rows, classes] else.

        The targets of rows without a label are NaN.
        """
        import torch

        logits, labels = outputs.logits, outputs.labels
        if logits is None or labels is None or logits.ndim != 2:
            return None
        scores = logits.detach().cpu().double()
        if is_multi_label(outputs):
            return {"class_scores": scores, "class_targets": (labels.cpu() > 0.5).double()}
        if not is_single_label(outputs):
            return None
        labels = labels.cpu()
        unlabelled = (labels == IGNORED)[:, None]
        targets = (labels[:, None] == torch.arange(scores.shape[1])).double().masked_fill(unlabelled, torch.nan)
        if scores.shape[1] == 2:
            return {"class_scores": scores[:, 1] - scores[:, 0], "class_targets": targets[:, 1]}
        return {"class_scores": scores.log_softmax(-1), "class_targets": targets}

    def value_of_rows(self, rows: Mapping[str, Values], counts: Values) -> Values:
        """Returns the area; NaN for samples in which no class has rows within and without it."""
        scores, targets = (np.atleast_2d(rows[name].T) for name in self.sums)
        areas = np.stack([area(of, right, counts) for of, right in zip(scores, targets, strict=True)])
        known = np.isfinite(areas)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(known, areas, 0.0).sum(0) / known.sum(0))


def area(scores: Values, targets: Values, counts: Values) -> Values:
    """Returns the area under the curve of samples of rows, [...]; NaN without rows of both kinds.

    scores, targets: [rows], targets 0 or 1, or NaN for rows that do not count.
    counts: how often each sample has each row, [..., rows].

    The area is sum_s P(s) (N(<s) + N(s)/2) / (P N), where P(s) and N(s) are the numbers of positive and negative rows
    with the score s.
    """
    if not len(scores):
        return np.full(counts.shape[:-1], np.nan)
    order = np.argsort(scores, kind="stable")
    sorted_scores, sorted_counts = scores[order], counts[..., order]
    starts = np.flatnonzero(np.r_[True, sorted_scores[1:] != sorted_scores[:-1]])
    positives = np.add.reduceat(sorted_counts * (targets[order] == 1), starts, axis=-1)
    negatives = np.add.reduceat(sorted_counts * (targets[order] == 0), starts, axis=-1)
    below = np.cumsum(negatives, axis=-1) - negatives / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((positives * below).sum(-1) / (positives.sum(-1) * negatives.sum(-1)))
