"""A few short completions, on which a probe computes a tiny step."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ringmaster.errors import StepError
from ringmaster.features.on_policy.loss import ADVANTAGES, REWARDS, OnPolicyLoss
from ringmaster.features.on_policy.rollout import prompts_of, rollout_of
from ringmaster.techniques.model_facts import num_positions
from ringmaster.techniques.probing.faults import explained
from ringmaster.techniques.probing.tiny import LONGEST
from ringmaster.techniques.training.generation import WriterContext
from ringmaster.techniques.training.token_sampling import prompt_seed

MAX_NEW_TOKENS = 8


def batch_of(
    prompts: Mapping[str, Tensor], function: OnPolicyLoss, context: WriterContext, *, seed: int, seq_len: int
) -> dict[str, Tensor]:
    """Returns the batch of a few short completions; rewarded ones with random advantages, which always have gradients.

    Raises StepError where the model has too few positions, or where a reward function fails or returns no numbers.
    """
    generation, model = function.generation, context.model
    longest, has = seq_len + generation.max_new_tokens, num_positions(getattr(model, "config", None))
    if has is not None and has < longest:
        raise StepError(
            [
                f"loss: prompts and completions have up to {longest} tokens, and the model {has} positions. To fix: "
                "lower loss.max_new_tokens or data.seq_len, or set model.config.max_position_embeddings"
            ]
        )
    what = "rewards" if generation.rewards else "completions"
    with explained(f"loss: its {what} cannot be computed", "correct the reward function, or the columns of the data"):
        rollout = rollout_of(function, context)
        prompts_of(prompts)  # raises where the data is of another kind
        if generation.share < 1:
            rollout.given(prompts)
        short = replace(generation, max_new_tokens=min(generation.max_new_tokens, MAX_NEW_TOKENS))
        seeds = [prompt_seed(seed, 0, place) for place in range(len(prompts["input_ids"]))]
        batch = replace(rollout, generation=short).completed(model, _last_tokens(prompts), seeds=seeds)
    if not generation.rewards:
        return batch
    draw = torch.Generator().manual_seed(0)
    rewards = torch.rand(batch[REWARDS].shape, generator=draw)
    return {**batch, ADVANTAGES: function.advantages(rewards, of_batch=rewards)}


def _last_tokens(prompts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The prompts with the last few of their tokens, which are padded on the right."""
    mask = prompts["attention_mask"]
    is_last = mask.flip(-1).cumsum(-1).flip(-1) <= LONGEST
    return {**prompts, "attention_mask": mask * is_last}
