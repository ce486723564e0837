"""The mean loss and its perplexity, and the errors of predicted numbers (MSE, MAE, R2)."""

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

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean itself."""
        return type(self) is MeanLoss

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the mean; NaN where nothing was counted, whatever a user's loss has summed."""
        counts = sums["loss_counts"]
        return sums["loss_sums"] / np.where(counts, counts, np.nan)


class Perplexity(MeanLoss):
    """The exponential of the mean loss."""

    name = "perplexity"
    default_for: ClassVar = {"causal": 2}

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns exp(mean loss)."""
        return np.exp(np.minimum(super().value(sums), 700.0))  # above 700 a double overflows


class Regression(Metric):
    """A metric of models that predict one number of each row, or of each position in it."""

    sums: ClassVar[tuple[str, ...]] = ("squared_errors", "absolute_errors", "targets", "squared_targets", "num_targets")
    needs = "one predicted number for each label: logits [rows, 1], labels [rows]"

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the sums of each row, [rows]; None unless the model predicts one number for each label."""
        logits, labels = outputs.logits, outputs.labels
        if logits is None or labels is None or logits.shape[-1] != 1 or logits.numel() != labels.numel():
            return None
        targets = labels.double().reshape(len(labels), -1)
        errors = logits.double().reshape(len(labels), -1) - targets
        result = (errors.square(), errors.abs(), targets, targets.square(), targets * 0 + 1)
        return {name: each.sum(1) for name, each in zip(Regression.sums, result, strict=True)}


class Mse(Regression):
    """The mean of the squared errors."""

    name = "mse"
    higher_is_better = False
    sums = ("squared_errors", "num_targets")


class Mae(Regression):
    """The mean of the absolute errors."""

    name = "mae"
    higher_is_better = False
    sums = ("absolute_errors", "num_targets")


class R2(Regression):
    """1 - (sum of squared errors) / (sum of squared differences of the labels from their mean)."""

    name = "r2"
    undefined_where = "the labels of the evaluated rows are all equal"
    higher_is_better = True

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the coefficient; NaN where all labels are equal."""
        spread = sums["squared_targets"] - sums["targets"] ** 2 / sums["num_targets"]
        # What is left of equal labels is a rounding error of their squares.
        is_spread = spread > 1e-12 * np.asarray(sums["squared_targets"])
        return np.asarray(1.0 - sums["squared_errors"] / np.where(is_spread, spread, np.nan))
