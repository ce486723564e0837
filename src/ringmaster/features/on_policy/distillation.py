"""On-policy distillation: a model learns a teacher's token probabilities on completions that it writes itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.features.on_policy.loss import Generation, OnPolicyLoss
from ringmaster.techniques import loss
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

DIVERGENCE, POLICY_GRADIENT = "divergence", "policy_gradient"


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillation(OnPolicyLoss):
    """The divergence of the student from its teacher, at each token of completions that the student writes.

    With the student p and the teacher q, softmax(logits / temperature) at a token, b = beta and m = b q + (1 - b) p:

        divergence:  b KL(q || m) + (1 - b) KL(p || m); KL(q || p) where b is 0, and KL(p || q) where b is 1

    over the whole vocabulary. `loss_type: policy_gradient` takes the tokens o_t alone that were written, with their
    contribution to -KL(p || q) as the advantage:

        A_t = log q(o_t) - log p_old(o_t)
        policy_gradient:  -r_t A_t,  r_t = p(o_t) / p_old(o_t)

    The share 1 - lmbda of the steps has the divergence on the completions of the rows instead. Both are means over the
    tokens of all completions of the global batch. There is one update for each generation, so that r is 1 and its
    gradient is that of log p. No gradient flows through the choice of the completions.

    Sources: Agarwal et al., On-Policy Distillation of Language Models (arXiv:2306.13649), equations 1 and 4;
    Gu et al., MiniLLM (arXiv:2306.08543), and Lu et al., On-Policy Distillation (Thinking Machines, 2025), for the
    advantage of each token without those of later ones. Options are named as in TRL, and have its defaults.
    """

    name: ClassVar[str] = "on-policy-distillation"
    needs_teacher: ClassVar[bool] = True

    teacher: str = loss.option("", loss.ModelName())
    beta: float = loss.option(1.0, loss.Values(least=0, most=1))
    lmbda: float = loss.option(1.0, loss.Values(least=0, most=1))
    temperature: float = loss.option(1.0, loss.Values(above=0))
    max_new_tokens: int = loss.option(512, loss.WholeNumbers(least=1))
    loss_type: str = loss.option(DIVERGENCE, loss.Values(among=(DIVERGENCE, POLICY_GRADIENT)))

    def conflicts(self) -> Iterator[loss.OptionFault]:
        """Yields a policy gradient of completions that the model has not written."""
        if self.loss_type == POLICY_GRADIENT and self.lmbda < 1:
            problem = "is below 1, and loss_type policy_gradient is for completions that the model writes"
            yield loss.OptionFault(option="lmbda", problem=problem, remedy="leave it out, or loss_type")

    @property
    def generation(self) -> Generation:
        """The completions of a step: one for each prompt."""
        return Generation(max_new_tokens=self.max_new_tokens, temperature=self.temperature, share=self.lmbda)

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the sum over the tokens of each prompt's completion, and their number."""
        if inputs.logits is None or inputs.labels is None or inputs.labels.dim() != 3:  # [rows, completions, tokens]
            raise ValueError(
                f"loss {self.name}: there are no completions. To fix: train a causal language model on prompts "
                "(data.kind: prompt)"
            )
        assert inputs.reference is not None, "the caller knows whether there is a teacher"
        each = self._policy_gradient(inputs) if self.loss_type == POLICY_GRADIENT else self._divergence(inputs)
        is_counted = inputs.labels != IGNORED
        return (each * is_counted).sum((1, 2)), is_counted.sum((1, 2))

    def _policy_gradient(self, inputs: loss.LossInputs) -> Tensor:
        assert inputs.logits is not None and inputs.labels is not None and inputs.reference is not None, "as checked"
        log_p = self.compared(inputs.logits, inputs.labels)
        return -(log_p - log_p.detach()).exp() * (inputs.reference - log_p.detach())

    def _divergence(self, inputs: loss.LossInputs) -> Tensor:
        """Returns the divergence at each position, [rows, completions, tokens]."""
        import torch

        assert inputs.logits is not None and inputs.reference is not None, "as checked"
        if inputs.reference.shape[-1] not in (1, inputs.logits.shape[-1]):
            raise ValueError(
                f"loss {self.name}: the teacher has a vocabulary of {inputs.reference.shape[-1]} tokens, and the model "
                f"one of {inputs.logits.shape[-1]}. To fix: give both the same vocabulary"
            )
        log_p = (inputs.logits.float() / self.temperature).log_softmax(-1)
        log_q = (inputs.reference.float() / self.temperature).log_softmax(-1)
        if self.beta in (0, 1):
            return _kl(log_q, log_p) if self.beta == 0 else _kl(log_p, log_q)
        log_m = torch.logaddexp(log_p + math.log1p(-self.beta), log_q + math.log(self.beta))
        return self.beta * _kl(log_q, log_m) + (1 - self.beta) * _kl(log_p, log_m)

    def compared(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the logits, or of policy gradients the log-probability of each labelled token and 0 elsewhere."""
        from ringmaster.techniques.losses.supervised import token_log_probabilities

        if self.loss_type == DIVERGENCE:
            return logits
        return token_log_probabilities(logits if self.temperature == 1 else logits / self.temperature, labels)

    def reference_shape(self, labels: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a shape that has one entry for all tokens of the vocabulary, or that of the labels."""
        return (*labels, 1) if self.loss_type == DIVERGENCE else labels


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Returns KL(a || b) over the last dimension."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)
