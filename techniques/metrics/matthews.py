"""Matthews correlation coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ringmaster.techniques.metric import Metric, Outputs
from ringmaster.techniques.metrics.class_counts import MAX_CLASSES, class_counts, is_single_label, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


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
