"""What losses have in common that are computed on completions which the model in training writes to prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques import loss

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.training.generation import SequenceWriter, WriterContext

ADVANTAGES, REWARDS = "advantages", "rewards"
"""The entries [rows, completions] of a batch of completions that are rewarded."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The completions that a model writes to the prompts of each step, on which its loss is computed.

    rewards: dotted names of functions f(prompts, completions, **columns) that return a number for each completion; ()
        where completions are not rewarded.
    weights: the factor of each function's rewards in their sum.
    num_generations: completions of each prompt.
    max_new_tokens: the most tokens of a completion.
    temperature: completions are sampled from softmax(logits / temperature).
    masks_truncated: whether completions of that many tokens without an end are not learnt.
    share: the share of steps that train on them; the others train on the `completion` of each row.
    """

    num_generations: int = 1
    max_new_tokens: int
    temperature: float
    rewards: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    masks_truncated: bool = False
    share: float = 1.0


class OnPolicyLoss(loss.LossFunction):
    """A loss of the completions that the model writes to the prompts of a step.

    It gets the completions' tensors: `input_ids` and `labels` are [rows, completions, tokens], `ADVANTAGES` and
    `REWARDS` are [rows, completions].
    """

    kinds: ClassVar[tuple[str, ...]] = (loss.CAUSAL,)
    needs_reference: ClassVar[bool] = True
    drops_out: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = (ADVANTAGES, REWARDS)

    @property
    @abstractmethod
    def generation(self) -> Generation:
        """The completions of a step."""

    @property
    def num_written_tokens(self) -> int:
        """The most tokens of a completion."""
        return self.generation.max_new_tokens

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that reward completions."""
        return self.generation.rewards

    @property
    def default_metrics(self) -> tuple[str, ...]:
        """The reward, as the loss of completions that are rewarded does not measure their quality."""
        return ("reward",) if self.generation.rewards else ()

    @property
    def num_sequences(self) -> int:
        """The number of completions of a prompt."""
        return self.generation.num_generations

    def advantages(self, rewards: Tensor, *, of_batch: Tensor) -> Tensor:
        """Returns how much better each completion is than the others, [prompts, completions]. NaN is not a reward.

        rewards: of some prompts, [prompts, completions]. of_batch: those of the whole global batch.
        """
        raise NotImplementedError(f"{self.name} has no rewards; a loss with some implements this")

    def sequence_writer(self, context: WriterContext) -> SequenceWriter:
        """Returns what writes completions, and rewards them."""
        from ringmaster.features.on_policy import trainer

        return trainer.rollout_of(self, context)

    def probe_batch(
        self, samples: Mapping[str, Tensor], context: WriterContext, *, seed: int, seq_len: int
    ) -> dict[str, Tensor]:
        """Returns the batch of a few short completions."""
        from ringmaster.features.on_policy.rollout import probe_batch_of

        return probe_batch_of(samples, self, context, seed=seed, seq_len=seq_len)
