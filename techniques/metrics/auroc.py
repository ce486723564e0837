"""Area under the receiver operating characteristic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ringmaster.techniques.metric import IGNORED, GatheredMetric, Outputs
from ringmaster.techniques.metrics.class_counts import is_multi_label, is_single_label

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


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
