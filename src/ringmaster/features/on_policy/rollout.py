"""Training on completions that the model itself writes: they are rewarded, and a batch is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from ringmaster.codec import digest
from ringmaster.errors import StepError
from ringmaster.features.on_policy.loss import ADVANTAGES, REWARDS, Generation, OnPolicyLoss
from ringmaster.features.on_policy.prompts import PROMPT, ROW
from ringmaster.features.on_policy.rewards import Rewards
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.sources.completion import answer_context, answer_tokens
from ringmaster.techniques.job_features import MAX_WHOLE
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.model_facts import num_positions
from ringmaster.techniques.probing.faults import explained
from ringmaster.techniques.probing.tiny import LONGEST
from ringmaster.techniques.training.generation import SequenceWriter, WriterContext
from ringmaster.techniques.training.rank_job import WIDTH_MULTIPLE
from ringmaster.techniques.training.token_sampling import EndTokens, prompt_seed, sample

MAX_PROBED_TOKENS = 8
"""The most tokens of a completion in a probe."""
HELD_OUT = "held out"
"""In place of a step, for the random numbers of completions of held-out prompts."""
NUM_SHARES = 1 << 32
COMPLETION = "completion"
"""The column of completions, for losses that do not train on those that the model writes in all steps."""


@dataclass(frozen=True, kw_only=True)
class Rollout(SequenceWriter):
    """Writes the completions of prompts, and rewards them.

    context: with which the completions of rows are encoded.
    autocast: returns the context of the job's precision.
    """

    function: OnPolicyLoss
    generation: Generation
    rewards: Rewards
    tokenizer: Any
    context: SampleContext
    ends: EndTokens
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    beat: Callable[[], None] = lambda: None

    def step_batches(
        self,
        model: nn.Module,
        samples: Iterable[dict[str, Tensor]],
        places: Sequence[Sequence[int]],
        *,
        seed: int,
        step: int,
        gather: Callable[[list[Tensor]], list[list[Tensor]]],
    ) -> tuple[list[dict[str, Tensor]], float | None]:
        """Returns the completions of the prompts of a step, and their mean reward, if any."""
        batches, writes = [], self.writes(seed, step)
        for prompts, own_places in zip(samples, places, strict=True):
            seeds = [prompt_seed(seed, step, place) for place in own_places]
            batches.append(self.completed(model, prompts, seeds=seeds) if writes else self.given(prompts))
            self.beat()
        if not self.generation.rewards:
            return batches, None
        own_rewards = torch.cat([batch[REWARDS].flatten() for batch in batches]).double().cpu()
        every = torch.cat(gather([own_rewards])[0])
        return [self._with_advantages(batch, every) for batch in batches], float(every.nanmean())

    def held_out_batch(
        self, model: nn.Module, samples: dict[str, Tensor], *, seed: int, rows: Sequence[int]
    ) -> dict[str, Tensor]:
        """Returns the completions of held-out prompts."""
        seeds = [prompt_seed(seed, HELD_OUT, row) for row in rows]
        batch = self.completed(model, samples, seeds=seeds)
        return self._with_advantages(batch, batch[REWARDS].flatten()) if self.generation.rewards else batch

    def completed(self, model: nn.Module, prompts: Mapping[str, Tensor], *, seeds: Sequence[int]) -> dict[str, Tensor]:
        """Returns the batch of the prompts' completions, [prompts, completions, ...], with any rewards, on the device.

        `input_ids` are padded on the right, so that they need no mask. Only the completions have `labels`.

        model: the whole model, as it is called by `generate`.
        prompts: a batch of data of kind "prompt". seeds: the seed of each prompt.
        """
        rows = prompts_of(prompts)
        tokens = [
            ids[mask.bool()].tolist() for ids, mask in zip(prompts["input_ids"], prompts["attention_mask"], strict=True)
        ]
        with self.autocast():
            written = sample_completions(
                model,
                tokens,
                seeds=seeds,
                generation=self.generation,
                ends=self.ends,
                device=self.device,
                beat=self.beat,
            )
        batch = _sequences(tokens, written, is_learnt=self._is_learnt, pad_id=self.ends.pad_id)
        if self.generation.rewards:
            batch[REWARDS] = self._rewards(rows, written).view(len(rows), -1)
        return {key: tensor.to(self.device) for key, tensor in batch.items()}

    def writes(self, seed: int, step: int) -> bool:
        """Returns whether a step trains on completions that the model writes; equal on all ranks."""
        drawn = int(digest(["share", seed, step]), 16) % NUM_SHARES / NUM_SHARES
        return self.ends.are_ignored or drawn < self.generation.share

    def given(self, prompts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the batch of the completions of the prompts' rows, in place of those that the model writes.

        Raises ValueError where a row has none.
        """
        tokens, completions = [], []
        for row in prompts_of(prompts):
            if not row.get(COMPLETION):
                raise ValueError(f"a row has no {COMPLETION}. To fix: give each one, or train on the model's alone")
            answered = answer_tokens(row[PROMPT], row[COMPLETION], self.context)
            num_of_prompt = answered["labels"].count(IGNORED)
            tokens.append(answered["input_ids"][:num_of_prompt])
            completions.append([answered["input_ids"][num_of_prompt:][: self.generation.max_new_tokens]])
        batch = _sequences(tokens, completions, is_learnt=lambda *_: True, pad_id=self.ends.pad_id)
        return {key: tensor.to(self.device) for key, tensor in batch.items()}

    def _with_advantages(self, batch: dict[str, Tensor], every: Tensor) -> dict[str, Tensor]:
        """Returns a batch with the advantages of its completions. every: the rewards of the global batch."""
        return {**batch, ADVANTAGES: self.function.advantages(batch[REWARDS], of_batch=every.to(batch[REWARDS]))}

    def _is_learnt(self, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        """Returns whether a completion has labels: not one that was cut off, where such ones are masked."""
        return not self.generation.masks_truncated or self.ends.are_ignored or self.ends.end(prompt, completion)

    def _rewards(self, rows: Sequence[Mapping[str, Any]], written: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        number = self.generation.num_generations
        repeated = [row for row in rows for _ in range(number)]
        ids = [completion for group in written for completion in group]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        prompts = [row[PROMPT] for row in repeated]
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns = {name: [row[name] for row in repeated] for name in rows[0] if name != PROMPT}
        return self.rewards(prompts, completions, completion_ids=ids, columns=columns)


def rollout_of(function: OnPolicyLoss, context: WriterContext) -> Rollout:
    """Returns the rollout of a job's loss.

    Raises ValueError where the model cannot generate, or the data has no tokenizer.
    """
    context.check_generates(f"loss {function.name}")
    if context.tokenizer_dir is None:
        raise ValueError(
            f"loss {function.name}: the data has no tokenizer to read completions with. To fix: give data of kind "
            "prompt"
        )
    rewards = Rewards(function.generation)
    if not context.is_trained:
        rewards.check_without_training()
    return Rollout(
        function=function,
        generation=function.generation,
        rewards=rewards,
        tokenizer=context.tokenizer,
        context=answer_context(context.tokenizer_dir, max_length=MAX_WHOLE),
        ends=context.ends,
        device=context.device,
        autocast=context.autocast,
        beat=context.beat,
    )


def probe_batch_of(
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
        short = replace(generation, max_new_tokens=min(generation.max_new_tokens, MAX_PROBED_TOKENS))
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


def sample_completions(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    generation: Generation,
    ends: EndTokens,
    device: torch.device,
    beat: Callable[[], None] = lambda: None,
) -> list[list[list[int]]]:
    """Returns the tokens of the completions of each prompt, each with the token that ended it, if one did.

    model: a language model of transformers. prompts: the tokens of each. seeds: of each prompt's random numbers.
    beat: called before each token.
    """
    return sample(
        model,
        prompts,
        max_new_tokens=generation.max_new_tokens,
        number=generation.num_generations,
        processor=_GumbelNoise(seeds, generation=generation, device=device, beat=beat),
        ends=ends,
        device=device,
    )


class _GumbelNoise(LogitsProcessor):  # type: ignore[misc]
    """Divides logits by the temperature and adds Gumbel noise, of which each prompt has a generator.

    A token is sampled from softmax(logits / T) as the argmax of logits / T - log E, with E exponentially distributed
    (the Gumbel-max trick: Maddison et al., A* Sampling, arXiv:1411.0030, section 2). Each prompt draws E from a
    generator of its own, so that transformers' `generate` may answer any number of prompts at once, by greedy search.
    """

    def __init__(
        self, seeds: Sequence[int], *, generation: Generation, device: torch.device, beat: Callable[[], None]
    ) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._generation, self._beat = generation, beat

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores [sequences, vocabulary] whose argmax is a sample."""
        self._beat()
        shape = (self._generation.num_generations, scores.shape[-1])
        drawn = [torch.empty(shape, device=scores.device).exponential_(generator=each) for each in self._generators]
        smallest = torch.finfo(torch.float32).tiny
        return scores.float() / self._generation.temperature - torch.cat(drawn).clamp_(min=smallest).log_()


def prompts_of(batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Returns the rows of a batch of prompts, by column. Raises ValueError where the data is of another kind."""
    if ROW not in batch:
        raise ValueError("loss: the samples are not prompts. To fix: set data.kind to prompt")
    return [json.loads(bytes(row[row != 0].tolist())) for row in batch[ROW].cpu()]


def _sequences(
    tokens: Sequence[list[int]],
    written: Sequence[Sequence[list[int]]],
    *,
    is_learnt: Callable[[Sequence[int], Sequence[int]], bool],
    pad_id: int,
) -> dict[str, Tensor]:
    """Returns prompts with their completions, [prompts, completions, tokens], and the labels of those to learn."""
    longest = max(len(prompt) + len(each) for prompt, group in zip(tokens, written, strict=True) for each in group)
    width = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    ids = torch.full((len(tokens), len(written[0]), width), pad_id, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, group) in enumerate(zip(tokens, written, strict=True)):
        for place, completion in enumerate(group):
            end = len(prompt) + len(completion)
            ids[row, place, :end] = torch.tensor(prompt + completion)
            if is_learnt(prompt, completion):
                labels[row, place, len(prompt) : end] = torch.tensor(completion)
    return {"input_ids": ids, "labels": labels}
