"""Exact match, under teacher forcing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringmaster.techniques.metric import IGNORED, Metric, Outputs
from ringmaster.techniques.metrics.tokens import NEEDS, most_likely

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


class ExactMatch(Metric):
    """The share of rows of which every labelled token is the most likely one, given the true tokens before it.

    This is the share of rows whose labelled tokens greedy decoding would generate: it generates them all if and only if
    each is the most likely one after the true tokens before it. Rows without labels do not count.
    """

    name = "exact_match"
    higher_is_better = True
    sums = ("exact_rows", "labelled_rows")
    needs = NEEDS
    share_of = "labelled_rows"
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns whether each row matches, and whether it has labels, [rows]."""
        predicted, labels = most_likely(outputs), outputs.labels
        if predicted is None or labels is None:
            return None
        counted = labels != IGNORED
        labelled = counted.any(1)
        return {"exact_rows": ((predicted == labels) | ~counted).all(1) & labelled, "labelled_rows": labelled}

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the share."""
        return sums["exact_rows"] / sums["labelled_rows"]
