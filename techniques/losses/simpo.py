"""Simple preference optimization, without a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.loss import LossInputs, Values, option
from ringmaster.techniques.losses.preferences import CHOSEN, REJECTED, PreferenceLoss, mean_log_probabilities

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Simpo(PreferenceLoss):
    """The mean over pairs of -log sigmoid(reward(y+) - reward(y-) - gamma).

    The reward of a sequence is beta log p(y | x) / |y|, with the mean over its tokens. Source: Meng et al.
    (arXiv:2405.14734), equation 6, whose authors advise beta from 2 to 2.5 and gamma about half of it.
    """

    name: ClassVar[str] = "simpo"

    beta: float = option(2.0, Values(above=0))
    gamma: float = option(1.0, Values(least=0))

    def each(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each pair, and ones."""
        import torch
        from torch.nn.functional import logsigmoid

        rewards = self.rewards_of(inputs)
        losses = -logsigmoid(rewards[:, CHOSEN] - rewards[:, REJECTED] - self.gamma)
        return losses, torch.ones_like(losses)

    def rewards_of(self, inputs: LossInputs) -> Tensor:
        """Returns beta log p(y | x) / |y| of both sequences of each pair."""
        return self.beta * mean_log_probabilities(*self.predictions(inputs))
