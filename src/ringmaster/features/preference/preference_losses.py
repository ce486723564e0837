"""Losses of pairs of a chosen and a rejected answer: DPO, ORPO and SimPO, and that of reward models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.features.preference.preference_rows import MARGIN
from ringmaster.techniques import loss
from ringmaster.techniques.losses.supervised import log_probabilities, token_log_probabilities
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

CHOSEN, REJECTED = 0, 1


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(loss.LossFunction):
    """A mean over answers. The model's dropout is off, as in TRL: its noise would be taken for a preference."""

    kinds: ClassVar[tuple[str, ...]] = (loss.CAUSAL,)
    in_pairs: ClassVar[bool] = True
    drops_out: ClassVar[bool] = False

    def predictions(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns logits and labels; of pairs [rows, 2, tokens, vocabulary], [rows, 2, tokens]. Raises ValueError."""
        if inputs.logits is None or inputs.labels is None:
            missing = "the model returns no logits" if inputs.logits is None else "the samples have no labels"
            raise ValueError(
                f"loss {self.name}: {missing}. To fix: train a causal language model on answers with labels"
            )
        return inputs.logits, inputs.labels

    def log_ratios(self, inputs: loss.LossInputs) -> Tensor:
        """Returns how much likelier each answer is than under the reference: the difference of log-probabilities."""
        assert inputs.reference is not None, "the caller knows whether there is a reference"
        return log_probabilities(*self.predictions(inputs)) - inputs.reference


def mean_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean log-probability of the labelled tokens of each sequence, [rows, 2]; 0 without any."""
    return log_probabilities(logits, labels) / num_labelled(labels)


def num_labelled(labels: Tensor) -> Tensor:
    """Returns the number of labelled tokens of each sequence, at least 1: [rows, 2]."""
    return (labels != IGNORED).sum(-1).clamp(min=1)


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

    beta: float = loss.option(0.1, loss.Values(above=0))
    label_smoothing: float = loss.option(0.0, loss.Values(least=0, below=0.5))
    loss_type: str = loss.option("sigmoid", loss.Values(among=("sigmoid", "ipo")))

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each pair, and ones."""
        import torch
        from torch.nn.functional import logsigmoid

        ratios = self.log_ratios(inputs)
        if self.loss_type == "ipo":
            ratios = ratios / num_labelled(self.predictions(inputs)[1])
        margin = ratios[:, CHOSEN] - ratios[:, REJECTED]
        if self.loss_type == "ipo":
            losses = (margin - 1 / (2 * self.beta)).square()
        else:
            e, scaled = self.label_smoothing, self.beta * margin
            losses = -(1 - e) * logsigmoid(scaled) - e * logsigmoid(-scaled)
        return losses, torch.ones_like(losses)

    def rewards_of(self, inputs: loss.LossInputs) -> Tensor:
        """Returns beta r(y) of both sequences of each pair."""
        return self.beta * self.log_ratios(inputs)


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

    beta: float = loss.option(0.1, loss.Values(above=0))
    prompt_loss: bool = loss.option(True, loss.YesOrNo())

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
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

    def rewards_of(self, inputs: loss.LossInputs) -> Tensor:
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


@dataclass(frozen=True, kw_only=True)
class Simpo(PreferenceLoss):
    """The mean over pairs of -log sigmoid(reward(y+) - reward(y-) - gamma).

    The reward of a sequence is beta log p(y | x) / |y|, with the mean over its tokens. Source: Meng et al.
    (arXiv:2405.14734), equation 6, whose authors advise beta from 2 to 2.5 and gamma about half of it.
    """

    name: ClassVar[str] = "simpo"

    beta: float = loss.option(2.0, loss.Values(above=0))
    gamma: float = loss.option(1.0, loss.Values(least=0))

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each pair, and ones."""
        import torch
        from torch.nn.functional import logsigmoid

        rewards = self.rewards_of(inputs)
        losses = -logsigmoid(rewards[:, CHOSEN] - rewards[:, REJECTED] - self.gamma)
        return losses, torch.ones_like(losses)

    def rewards_of(self, inputs: loss.LossInputs) -> Tensor:
        """Returns beta log p(y | x) / |y| of both sequences of each pair."""
        return self.beta * mean_log_probabilities(*self.predictions(inputs))


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(PreferenceLoss):
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
