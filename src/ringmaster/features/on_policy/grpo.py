"""Group relative policy optimization: a model learns from rewards of completions that it writes itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.features.on_policy.loss import ADVANTAGES, REWARDS, Generation, OnPolicyLoss
from ringmaster.techniques import loss
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

RLOO = "rloo"
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", RLOO)
SCALES = ("group", "batch", "none")
STD_EPSILON = 1e-4  # as in TRL
TINY_COUNT = 1e-9
"""The number of tokens of a row without any, so that a step none of whose completions counts has the mean 0."""


@dataclass(frozen=True, kw_only=True)
class Grpo(OnPolicyLoss):
    """The clipped policy gradient of completions whose advantage is their reward compared with that of their group.

    To each prompt the model writes a group of G completions o_1 ... o_G, with rewards R_1 ... R_G. With p the policy,
    softmax(logits / temperature), p_old its values before the step and e = epsilon:

        A_i = (R_i - mean R) / (std R + 1e-4)
        r_it = p(o_it) / p_old(o_it)
        l_it = -min(r_it A_i, clip(r_it, 1 - e, 1 + e_high) A_i) + beta r_it (q_it - log q_it - 1),  q = p_ref / p

    There is one update for each generation, so that r is 1 and its gradient is that of log p. The factor r of the
    divergence, which `use_bias_correction_kl: false` leaves out, makes its gradient unbiased (DeepSeek-V3.2,
    arXiv:2512.02556). `loss_type` averages:

        dapo, bnpo:  sum of l_it / number of tokens of all completions of the global batch
        grpo:        mean over completions of the mean over their tokens
        dr_grpo:     sum of l_it / (number of completions * max_new_tokens)

    `scale_rewards` divides by the standard deviation of the group, of the global batch ("batch"), or by none.
    `mask_truncated_completions` leaves out completions that reach max_new_tokens without an end.

    `loss_type: rloo` is another estimator. A completion is one action, the divergence is a part of its reward, and the
    other completions of its prompt are its baseline:

        R'_i = R_i - beta sum over t of log(p_old(o_it) / p_ref(o_it))
        A_i = R'_i - mean of R'_j over j != i
        r_i = p(o_i) / p_old(o_i)
        mean over completions of -min(r_i A_i, clip(r_i, 1 - e, 1 + e_high) A_i)

    There `scale_rewards` is none, or "batch": A - mean A of the global batch, divided by its standard deviation.

    Sources: Shao et al., DeepSeekMath (arXiv:2402.03300), equations 3 and 4; Yu et al., DAPO (arXiv:2503.14476),
    equation 8 and section 3.4; Liu et al., Dr. GRPO (arXiv:2503.20783), section 3; Ahmadian et al., RLOO
    (arXiv:2402.14740), equation 8. Options are named as in TRL, and have its defaults.
    """

    name: ClassVar[str] = "grpo"

    rewards: tuple[str, ...] = loss.option((), loss.DottedNames(required=True))
    reward_weights: tuple[float, ...] = loss.option((), loss.Values(is_list=True))
    num_generations: int = loss.option(8, loss.WholeNumbers(least=2))
    max_new_tokens: int = loss.option(512, loss.WholeNumbers(least=1))
    temperature: float = loss.option(1.0, loss.Values(above=0))
    beta: float = loss.option(0.0, loss.Values(least=0))
    epsilon: float = loss.option(0.2, loss.Values(above=0, below=1))
    epsilon_high: float | None = loss.option(None, loss.Values(above=0))
    use_bias_correction_kl: bool = loss.option(True, loss.YesOrNo())
    loss_type: str = loss.option("dapo", loss.Values(among=LOSS_TYPES))
    scale_rewards: str | None = loss.option(None, loss.Values(among=SCALES))
    mask_truncated_completions: bool = loss.option(False, loss.YesOrNo())

    def conflicts(self) -> Iterator[loss.OptionFault]:
        """Yields other numbers of weights than of rewards, and scales that rloo does not have."""
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            problem = f"has {len(self.reward_weights)} numbers for {len(self.rewards)} rewards"
            yield loss.OptionFault(option="reward_weights", problem=problem, remedy="give one for each")
        if self.loss_type == RLOO and self._scale == "group":
            problem = "group is not for loss_type rloo, whose baseline is that of the group"
            yield loss.OptionFault(option="scale_rewards", problem=problem, remedy="write batch or none")
        if self.loss_type == RLOO and self._scale == "batch" and self.compares:
            problem = "batch is not for loss_type rloo with beta, which changes the rewards after they are scaled"
            yield loss.OptionFault(option="scale_rewards", problem=problem, remedy="write none, or set beta to 0")

    @property
    def _scale(self) -> str:
        return self.scale_rewards or ("none" if self.loss_type == RLOO else "group")

    @property
    def generation(self) -> Generation:
        """The completions of a step."""
        return Generation(
            rewards=self.rewards,
            weights=self.reward_weights or (1.0,) * len(self.rewards),
            num_generations=self.num_generations,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            masks_truncated=self.mask_truncated_completions,
        )

    @property
    def compares(self) -> bool:
        """Whether the divergence from the initial weights is part of the loss."""
        return self.beta > 0

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the sum of each prompt's completions, and the number of what is averaged."""
        import torch

        if inputs.logits is None or inputs.labels is None or ADVANTAGES not in inputs.batch:
            raise ValueError(
                "loss grpo: there are no completions with advantages. To fix: train a causal language model on "
                "prompts (data.kind: prompt)"
            )
        log_p = self.compared(inputs.logits, inputs.labels)
        if self.loss_type == RLOO:
            losses = self._clipped((log_p - log_p.detach()).sum(-1), self._penalized(inputs, log_p.detach()))
            return losses.sum(-1), torch.full_like(losses[:, 0], losses.shape[1])
        log_ratio = log_p - log_p.detach()
        losses, ratio = self._clipped(log_ratio, inputs.batch[ADVANTAGES].float().unsqueeze(-1)), log_ratio.exp()
        if self.compares:
            assert inputs.reference is not None, "the caller knows whether there is a reference"
            log_q = inputs.reference - log_p
            divergence = torch.exp(log_q) - log_q - 1
            losses = losses + self.beta * (divergence * ratio if self.use_bias_correction_kl else divergence)
        is_counted = inputs.labels != IGNORED
        sums, num_tokens = (losses * is_counted).sum(-1), is_counted.sum(-1)
        if self.loss_type in ("dapo", "bnpo"):
            return sums.sum(-1), num_tokens.sum(-1).clamp(min=TINY_COUNT)
        means = sums / (num_tokens.clamp(min=1) if self.loss_type == "grpo" else self.max_new_tokens)
        return means.sum(-1), torch.full_like(means[:, 0], means.shape[1])

    def _clipped(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        import torch

        ratio, high = log_ratio.exp(), self.epsilon if self.epsilon_high is None else self.epsilon_high
        return -torch.min(ratio * advantages, ratio.clamp(1 - self.epsilon, 1 + high) * advantages)

    def _penalized(self, inputs: loss.LossInputs, log_p: Tensor) -> Tensor:
        """Returns the advantages of rloo with the divergence's share, which is linear: [rows, completions]."""
        advantages = inputs.batch[ADVANTAGES].float()
        if not self.compares:
            return advantages
        assert inputs.reference is not None and inputs.labels is not None, "as checked"
        divergence = ((log_p - inputs.reference) * (inputs.labels != IGNORED)).sum(-1)
        rewards = inputs.batch.get(REWARDS, divergence)
        return advantages - self.beta * _left_out(divergence.where(~rewards.isnan(), math.nan)).nan_to_num(nan=0.0)

    def compared(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the policy's log-probability of each labelled token, 0 elsewhere: [rows, completions, tokens]."""
        from ringmaster.techniques.losses.supervised import token_log_probabilities

        return token_log_probabilities(logits if self.temperature == 1 else logits / self.temperature, labels)

    def reference_shape(self, labels: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the labels."""
        return labels

    def advantages(self, rewards: Tensor, *, of_batch: Tensor) -> Tensor:
        """Returns A; 0 for completions without a reward (NaN), which the mean and the deviation leave out too."""
        if self.loss_type == RLOO:
            advantages, every = _left_out(rewards), _left_out(of_batch.reshape(-1, rewards.shape[-1])).flatten()
            if self._scale == "batch":
                advantages = (advantages - every.nanmean()) / (_nanstd(every) + STD_EPSILON)
            return advantages.nan_to_num(nan=0.0)
        advantages = rewards - rewards.nanmean(-1, keepdim=True)
        if self._scale == "group":
            advantages = advantages / (_nanstd(rewards) + STD_EPSILON)
        elif self._scale == "batch":
            advantages = advantages / (_nanstd(of_batch.flatten()) + STD_EPSILON)
        return advantages.nan_to_num(nan=0.0)


def _left_out(values: Tensor) -> Tensor:
    """Returns how much greater each value of a group is than the mean of the others, [..., group]; NaN does not count.

    The only value of a group becomes NaN.
    """
    num_others = (~values.isnan()).sum(-1, keepdim=True) - 1
    return values - (values.nansum(-1, keepdim=True) - values) / num_others


def _nanstd(values: Tensor) -> Tensor:
    """Returns the standard deviation over the last dimension (n - 1 degrees of freedom) without NaN: [..., 1]."""
    count = (~values.isnan()).sum(-1, keepdim=True)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()
