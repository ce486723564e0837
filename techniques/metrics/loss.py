"""The job's loss as a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringmaster.techniques.metric import Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


class MeanLoss(Metric):
    """The mean of the job's loss over what it averages: labels, tokens or rows."""

    name = "loss"
    higher_is_better = False
    sums = ("loss_sums", "loss_counts")
    default_for: ClassVar = {"causal": 1, "classifier": 2, "other": 1}

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the loss and the number of averaged elements of each row."""
        return None if outputs.losses is None else dict(zip(self.sums, outputs.losses, strict=True))

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the mean; NaN where nothing was counted, whatever a user's loss has summed."""
        counts = sums["loss_counts"]
        return sums["loss_sums"] / np.where(counts, counts, np.nan)
