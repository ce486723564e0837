"""The loss of reward models: classifiers with one output that is greater for the better one of two answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.features.preference.comparison_rows import MARGIN
from ringmaster.features.preference.preference_losses import CHOSEN, REJECTED
from ringmaster.techniques import loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(loss.LossFunction):
    """The negative log-likelihood of the better answers, whose probability is that of Bradley and Terry's model.

    With the rewards r+ of the chosen and r- of the rejected answer, the outputs of the model, and the margin m of the
    row, 0 without one:

        mean over pairs of -log sigmoid(r+ - r- - m) + center_rewards_coefficient * (r+ + r-)^2

    Sources: Ouyang et al., InstructGPT (arXiv:2203.02155), equation 1; Touvron et al., Llama 2 (arXiv:2307.09288),
    equation 2, for the margin; Eisenstein et al. (arXiv:2312.09244), section 2.1, for the second term, which
    centers the rewards. As in TRL's RewardTrainer, dropout is off.
    """

    name: ClassVar[str] = "bradley-terry"
    kinds: ClassVar[tuple[str, ...]] = (loss.CLASSIFIER,)
    in_pairs: ClassVar[bool] = True
    drops_out: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = (MARGIN,)

    center_rewards_coefficient: float = loss.option(0.0, loss.Values(least=0))

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each pair, and ones."""
        import torch
        from torch.nn.functional import logsigmoid

        rewards = self.rewards_of(inputs)
        margin = inputs.batch.get(MARGIN, torch.zeros((), device=rewards.device))
        losses = -logsigmoid(rewards[:, CHOSEN] - rewards[:, REJECTED] - margin)
        if self.center_rewards_coefficient:
            losses = losses + self.center_rewards_coefficient * rewards.sum(-1).square()
        return losses, torch.ones_like(losses)

    def rewards_of(self, inputs: loss.LossInputs) -> Tensor:
        """Returns the outputs for both answers of each pair, [rows, 2]. Raises ValueError where there are others."""
        if inputs.logits is None or inputs.logits.dim() != 3 or inputs.logits.shape[-1] != 1:
            outputs = "no logits" if inputs.logits is None else f"logits {list(inputs.logits.shape)}"
            raise ValueError(
                f"loss bradley-terry: the model returns {outputs}, and not one number for each answer. To fix: train a "
                "class such as LlamaForSequenceClassification, with model.config.num_labels: 1"
            )
        return inputs.logits.float().squeeze(-1)
