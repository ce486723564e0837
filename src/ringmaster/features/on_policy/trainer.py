"""Training on completions that the model itself writes, and what takes its place where tensors have no values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.compat.torch import unset_fake_temporarily
from ringmaster.features.on_policy.loss import ADVANTAGES, REWARDS, OnPolicyLoss
from ringmaster.features.on_policy.rollout import Rollout, rollout_of
from ringmaster.techniques.training.generation import WriterContext
from ringmaster.techniques.training.rank_job import WIDTH_MULTIPLE
from ringmaster.techniques.training.token_sampling import EndTokens

__all__ = ["WITHOUT_VALUES", "rollout_of"]


class _RolloutWithoutValues(Rollout):
    """Completions of the greatest length, as if a `Rollout` had written them with a cache of keys and values."""

    def completed(self, model: nn.Module, prompts: Mapping[str, Tensor], *, seeds: Sequence[int]) -> dict[str, Tensor]:
        """Returns a batch without values."""
        number = self.generation.num_generations
        rows, width = prompts["input_ids"].shape
        longest = -(-(width + self.generation.max_new_tokens) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        cache = torch.empty(_cache_bytes(getattr(model, "config", None), rows * number * longest), dtype=torch.uint8)
        del cache  # its peak is counted
        with unset_fake_temporarily():
            tokens = torch.ones(rows, number, longest, dtype=torch.int64)
            return {"input_ids": tokens, "labels": tokens, REWARDS: torch.zeros(rows, number)}

    def _with_advantages(self, batch: dict[str, Tensor], every: Tensor) -> dict[str, Tensor]:
        return {**batch, ADVANTAGES: batch[REWARDS]}


def _cache_bytes(config: Any, num_tokens: int) -> int:
    """Returns the bytes of keys and values in fp32, 0 for models whose config does not name their sizes."""
    heads = getattr(config, "num_attention_heads", None)
    if config is None or not isinstance(heads, int):
        return 0
    kept = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * 4 * int(config.num_hidden_layers) * int(kept) * int(width) * num_tokens


def _without_values(function: OnPolicyLoss, context: WriterContext) -> Rollout:
    unread: Any = None
    return _RolloutWithoutValues(
        function=function,
        generation=function.generation,
        rewards=unread,
        tokenizer=unread,
        context=unread,
        ends=EndTokens(token_ids=(), pad_id=0, are_ignored=True),
        device=context.device,
        autocast=context.autocast,
    )


WITHOUT_VALUES: Mapping[str, Callable[..., Any]] = {"rollout_of": _without_values}
