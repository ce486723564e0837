"""What losses of preferences have in common: a sample is a pair of a chosen and a rejected sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.loss import CAUSAL, LossFunction, LossInputs
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

CHOSEN, REJECTED = 0, 1


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(LossFunction):
    """A mean over pairs. The model's dropout is off, as in TRL: its noise would be taken for a preference."""

    kinds: ClassVar[tuple[str, ...]] = (CAUSAL,)
    in_pairs: ClassVar[bool] = True
    drops_out: ClassVar[bool] = False

    def predictions(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns logits [rows, 2, tokens, vocabulary] and labels [rows, 2, tokens]. Raises ValueError."""
        if inputs.logits is None or inputs.labels is None:
            missing = "the model returns no logits" if inputs.logits is None else "the samples have no labels"
            raise ValueError(f"loss {self.name}: {missing}. To fix: train a causal language model on pairs with labels")
        return inputs.logits, inputs.labels


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the natural log-probability of the labelled tokens of each sequence, in fp32, [rows, 2].

    logits: [rows, 2, tokens, vocabulary]. labels: the token that each position predicts, [rows, 2, tokens].
    """
    return token_log_probabilities(logits, labels).sum(-1)


def token_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probability of each labelled token, and 0 where the label is -100: [rows, 2, tokens], fp32."""
    from torch.nn import functional

    flat = logits.reshape(-1, logits.shape[-1]).float()
    each = functional.cross_entropy(flat, labels.flatten().long(), ignore_index=IGNORED, reduction="none")
    return -each.reshape(labels.shape)


def mean_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean log-probability of the labelled tokens of each sequence, [rows, 2]; 0 without any."""
    return log_probabilities(logits, labels) / num_labelled(labels)


def num_labelled(labels: Tensor) -> Tensor:
    """Returns the number of labelled tokens of each sequence, at least 1: [rows, 2]."""
    return (labels != IGNORED).sum(-1).clamp(min=1)
