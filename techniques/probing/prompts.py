"""A few completions of a job's prompts by a probe's small model, which try out the job's reward functions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from ringmaster.errors import StepError
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job import Job
from ringmaster.techniques.loss import ADVANTAGES, REWARDS, LossFunction
from ringmaster.techniques.probing.batches import LONGEST
from ringmaster.techniques.probing.faults import explained
from ringmaster.techniques.training.generation import prompt_seed, prompts_of, rollout_of

MOST_NEW_TOKENS = 8


def completions_of(
    prompts: Mapping[str, Tensor], *, model: nn.Module, function: LossFunction, job: Job, data: PreparedData
) -> dict[str, Tensor]:
    """Returns the batch of a few short completions, with random advantages, which alone have gradients in any case.

    Raises StepError where the model has too few positions, or where a reward function fails or returns no numbers.
    """
    generation = function.generation
    assert generation is not None
    _check_positions(model, job, longest=(data.seq_len or 0) + generation.max_new_tokens)
    with explained("loss: its rewards cannot be computed", "correct the reward function, or the columns of the data"):
        rollout = rollout_of(
            function,
            model=model,
            tokenizer_dir=data.tokenizer_dir,
            device=torch.device("cpu"),
            autocast=nullcontext,
        )
        assert rollout is not None
        prompts_of(prompts)  # raises where the data is of another kind
        short = replace(generation, max_new_tokens=min(generation.max_new_tokens, MOST_NEW_TOKENS))
        seeds = [prompt_seed(job.seed, 0, place) for place in range(len(prompts["input_ids"]))]
        batch = replace(rollout, generation=short).completed(model, _last_tokens(prompts), seeds=seeds)
    draw = torch.Generator().manual_seed(0)
    rewards = torch.rand(batch[REWARDS].shape, generator=draw)
    return {**batch, ADVANTAGES: function.advantages(rewards, of_batch=rewards)}


def _check_positions(model: nn.Module, job: Job, *, longest: int) -> None:
    config = getattr(model, "config", None)
    has = next((n for key in ("max_position_embeddings", "n_positions") if (n := getattr(config, key, None))), None)
    if isinstance(has, int) and has < longest:
        raise StepError(
            [
                f"loss: prompts and completions have up to {longest} tokens, and the model {has} positions. To fix: "
                "lower loss.max_new_tokens or data.seq_len, or set model.config.max_position_embeddings"
            ]
        )


def _last_tokens(prompts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The prompts with the last few of their tokens, which are padded on the right."""
    mask = prompts["attention_mask"]
    is_last = mask.flip(-1).cumsum(-1).flip(-1) <= LONGEST
    return {**prompts, "attention_mask": mask * is_last}
