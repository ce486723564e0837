"""Odds ratio preference optimization, without a reference model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.loss import LossInputs, Values, YesOrNo, option
from ringmaster.techniques.losses.preferences import (
    CHOSEN,
    REJECTED,
    PreferenceLoss,
    mean_log_probabilities,
    token_log_probabilities,
)
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

PAIRS, TOKENS = "pairs", "chosen_tokens"


@dataclass(frozen=True, kw_only=True)
class Orpo(PreferenceLoss):
    """The cross entropy of the chosen sequences plus beta times the odds ratio's loss.

    With P(y | x) the geometric mean of the probabilities of y's tokens, and odds(y) = P(y | x) / (1 - P(y | x)):

        mean over tokens of -log p(token of y+)  -  beta * mean over pairs of log sigmoid(log(odds(y+) / odds(y-)))

    The first mean covers the prompts and the chosen sequences, as in the authors' code and TRL's, or with
    `prompt_loss: false` the chosen sequences alone. Source: Hong et al. (arXiv:2403.07691), equations 6 and 7. The
    reward of a sequence is beta log P(y | x), as in TRL.
    """

    name: ClassVar[str] = "orpo"
    total_names: ClassVar[tuple[str, ...]] = (PAIRS, TOKENS)

    beta: float = option(0.1, Values(above=0))
    prompt_loss: bool = option(True, YesOrNo())

    def each(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns each pair's loss, and ones.

        The two means have different denominators: the cross entropy is scaled by pairs / tokens of the global batch,
        so that dividing by the number of pairs gives both.
        """
        import torch
        from torch.nn.functional import logsigmoid

        logits, labels = self.predictions(inputs)
        means = mean_log_probabilities(logits, labels)
        log_odds = means - _log_1_minus_exp(means)
        ratio = logsigmoid(log_odds[:, CHOSEN] - log_odds[:, REJECTED])
        targets = self._targets(labels, inputs.batch["input_ids"])
        entropy = -token_log_probabilities(logits[:, CHOSEN], targets).sum(-1)
        losses = entropy * (inputs.totals[PAIRS] / inputs.totals[TOKENS]) - self.beta * ratio
        return losses, torch.ones_like(losses)

    def totals(self, labels: Tensor) -> Mapping[str, Tensor]:
        """Returns ones, and each row's number of tokens in the first mean."""
        import torch

        tokens = _is_read(labels) if self.prompt_loss else labels[:, CHOSEN] != IGNORED
        return {PAIRS: torch.ones(len(labels), device=labels.device), TOKENS: tokens.sum(-1).clamp(min=1)}

    def rewards_of(self, inputs: LossInputs) -> Tensor:
        """Returns beta log P(y | x) of both sequences of each pair."""
        return self.beta * mean_log_probabilities(*self.predictions(inputs))

    def _targets(self, labels: Tensor, tokens: Tensor) -> Tensor:
        """Returns the tokens of the chosen sequences that the cross entropy covers, as next tokens: [rows, tokens]."""
        if not self.prompt_loss:
            return labels[:, CHOSEN]
        following = tokens[:, CHOSEN].roll(-1, dims=-1)
        return following.masked_fill(~_is_read(labels), IGNORED)


def _is_read(labels: Tensor) -> Tensor:
    """Returns whether the next token of each position belongs to the prompt or the chosen sequence: [rows, tokens].

    Samples are padded on the right, so that these are all tokens up to the last one with a label.
    """
    labelled = labels[:, CHOSEN] != IGNORED
    return labelled.flip(-1).cumsum(-1).flip(-1) > 0


def _log_1_minus_exp(x: Tensor) -> Tensor:
    """Returns log(1 - e^x) of x <= 0, accurately near 0 and far from it (Maechler, log1mexp, equation 7)."""
    import torch

    x = x.clamp(max=-1e-7)  # a probability of exactly 1 has infinite odds
    near = torch.log(-torch.expm1(x))
    far = torch.log1p(-torch.exp(x))
    return torch.where(x > -math.log(2), near, far)
