"""Accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.interface.metric import IGNORED, Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.interface.metric import Values


class Accuracy(Metric):
    """The share of labels that have the largest logit; for language models, the share of tokens."""

    name = "accuracy"
    higher_is_better = True
    sums = ("hits", "labelled")
    share_of = "labelled"
    default_for: ClassVar = {"causal": 3, "classifier": 1}

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the number of correct predictions and of labels of each row; None without class labels."""
        logits, labels = outputs.logits, outputs.labels
        if logits is None or labels is None or logits.shape[:-1] != labels.shape:
            return None
        if logits.shape[-1] == 1 or labels.is_floating_point():
            return None
        counted = labels != IGNORED
        hits = (logits.argmax(-1) == labels) & counted
        return {name: each.reshape(len(labels), -1).sum(1) for name, each in (("hits", hits), ("labelled", counted))}

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the share."""
        return sums["hits"] / sums["labelled"]
