"""Accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.metric import IGNORED, Metric, Outputs
from ringmaster.techniques.metrics.class_counts import is_multi_label, is_single_label

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


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

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the share."""
        return sums["hits"] / sums["labelled"]
