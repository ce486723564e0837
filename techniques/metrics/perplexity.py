"""Perplexity, derived from the sums of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringmaster.techniques.metrics.loss import MeanLoss

if TYPE_CHECKING:
    from ringmaster.techniques.metric import Values


class Perplexity(MeanLoss):
    """The exponential of the mean loss."""

    name = "perplexity"
    default_for: ClassVar = {"causal": 2}

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns exp(mean loss)."""
        return np.exp(np.minimum(super().value(sums), 700.0))  # above 700 a double overflows
