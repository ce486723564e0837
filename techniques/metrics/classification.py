"""Accuracy, and what labels of classes are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringmaster.techniques.metric import IGNORED, Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


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


def ratio(numerator: Values, denominator: Values) -> Values:
    """Returns the ratio, and 0 where the denominator is 0."""
    return np.where(denominator == 0, 0.0, numerator / np.where(denominator == 0, 1.0, denominator))


class Accuracy(Metric):
    """The share of labels that have the largest logit; for language models, the share of tokens.

    Where several classes may be right (float labels, one for each class), the share of rows with all classes right.
    """

    name = "accuracy"
    higher_is_better = True
    sums = ("hits", "labelled")
    needs = "labels of classes, and a logit for each class"
    share_of = "labelled"
    default_for: ClassVar = {"causal": 3, "classifier": 1}

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the number of correct predictions and of labels of each row; None without class labels."""
        logits, labels = outputs.logits, outputs.labels
        if logits is None or labels is None:
            return None
        if is_multi_label(outputs):
            hits = ((logits > 0) == (labels > 0.5)).all(-1)
            counted = hits | True
        elif is_single_label(outputs):
            counted = labels != IGNORED
            hits = (logits.argmax(-1) == labels) & counted
        else:
            return None
        return {name: each.reshape(len(labels), -1).sum(1) for name, each in (("hits", hits), ("labelled", counted))}
