"""Mean squared error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.loss import LossFunction, LossInputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(LossFunction):
    """The mean of (prediction - label)^2 over all elements; predictions are the model's logits, or a tensor."""

    name: ClassVar[str] = "mse"

    def each(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the sum of squares of each row, and its number of elements."""
        import torch

        predicted, labels = inputs.logits, inputs.batch.get("labels")
        if predicted is None or labels is None:
            missing = "the model returns no logits" if predicted is None else "the samples have no labels"
            raise ValueError(f"loss mse: {missing}. To fix: train a model with logits on samples with labels")
        num_rows = len(labels)
        if predicted.numel() != labels.numel() or len(predicted) != num_rows:
            raise ValueError(
                f"loss mse: predictions are {list(predicted.shape)} and labels {list(labels.shape)}. To fix: give as "
                "many labels as predictions, or set model.config.num_labels"
            )
        squared = (predicted.float().reshape(num_rows, -1) - labels.float().reshape(num_rows, -1)).square()
        return squared.sum(1), torch.full_like(squared[:, 0], squared.shape[1])
