"""Direct preference optimization, and its variant IPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.loss import LossInputs, Values, option
from ringmaster.techniques.losses.preferences import (
    CHOSEN,
    REJECTED,
    PreferenceLoss,
    log_probabilities,
    num_labelled,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Dpo(PreferenceLoss):
    """The mean over pairs of -log sigmoid(beta h), where h is how much more the model prefers the chosen sequence.

    With the chosen y+, the rejected y- and e = label_smoothing:

        r(y) = log p(y | x) - log p_ref(y | x)
        h = r(y+) - r(y-)
        sigmoid:  -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
        ipo:      (r(y+) / |y+| - r(y-) / |y-| - 1 / (2 beta))^2

    Sources: Rafailov et al. (arXiv:2305.18290), equation 7; Mitchell, conservative DPO
    (https://ericmitchell.ai/cdpo.pdf); Azar et al., IPO (arXiv:2310.12036), equation 17, with the mean over tokens that
    TRL takes. A sequence's reward is beta r(y).
    """

    name: ClassVar[str] = "dpo"
    needs_reference: ClassVar[bool] = True

    beta: float = option(0.1, Values(above=0))
    label_smoothing: float = option(0.0, Values(least=0, below=0.5))
    loss_type: str = option("sigmoid", Values(among=("sigmoid", "ipo")))

    def each(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each pair, and ones."""
        import torch
        from torch.nn.functional import logsigmoid

        ratios = self._log_ratios(inputs)
        if self.loss_type == "ipo":
            ratios = ratios / num_labelled(self.predictions(inputs)[1])
        margin = ratios[:, CHOSEN] - ratios[:, REJECTED]
        if self.loss_type == "ipo":
            losses = (margin - 1 / (2 * self.beta)).square()
        else:
            e, scaled = self.label_smoothing, self.beta * margin
            losses = -(1 - e) * logsigmoid(scaled) - e * logsigmoid(-scaled)
        return losses, torch.ones_like(losses)

    def rewards_of(self, inputs: LossInputs) -> Tensor:
        """Returns beta r(y) of both sequences of each pair."""
        return self.beta * self._log_ratios(inputs)

    def _log_ratios(self, inputs: LossInputs) -> Tensor:
        assert inputs.reference is not None, "the caller knows whether there is a reference"
        return log_probabilities(*self.predictions(inputs)) - inputs.reference
