"""The batch of a step whose completions the model itself writes: prompts in, sequences with advantages out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.codec import digest
from ringmaster.techniques.data.sources.prompt import PROMPT, ROW
from ringmaster.techniques.interface.loss import ADVANTAGES, REWARDS, Generation, LossFunction
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.training.generation.rewards import Rewards
from ringmaster.techniques.training.generation.sampling import Ends, sample

WIDTH_MULTIPLE = 8
TURN_END = "<|im_end|>"
"""The token that ends a turn in the chat template ChatML, which is not always the tokenizer's end of text."""

HELD_OUT = "held out"
"""In place of a step, for the random numbers of completions of held-out prompts."""

Batch = dict[str, Tensor]


def prompt_seed(seed: int, step: int | str, place: int) -> int:
    """Returns the seed of the completions of one prompt, the one at `place` in the global batch of a step."""
    return int(digest(["completions", seed, step, place]), 16) % (1 << 63)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Writes the completions of prompts, and rewards them.

    function: a loss with a `generation`.
    autocast: returns the context of the job's precision.
    """

    function: LossFunction
    generation: Generation
    rewards: Rewards
    tokenizer: Any
    ends: Ends
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    beat: Callable[[], None] = lambda: None

    def completed(self, model: nn.Module, prompts: Mapping[str, Tensor], *, seeds: Sequence[int]) -> Batch:
        """Returns the batch of the prompts' completions, [prompts, completions, ...], with rewards, on the device.

        `input_ids` are padded on the right, so that they need no mask. Only the completions have `labels`.

        model: the whole model, as it is called by `generate`.
        prompts: a batch of data of kind "prompt". seeds: the seed of each prompt.
        """
        rows = prompts_of(prompts)
        tokens = [
            ids[mask.bool()].tolist() for ids, mask in zip(prompts["input_ids"], prompts["attention_mask"], strict=True)
        ]
        with self.autocast():
            written = sample(
                model,
                tokens,
                seeds=seeds,
                generation=self.generation,
                ends=self.ends,
                device=self.device,
                beat=self.beat,
            )
        batch = _sequences(tokens, written, pad_id=self.ends.pad_id)
        rewards = self._rewards(rows, written).view(len(rows), -1)
        return {key: tensor.to(self.device) for key, tensor in {**batch, REWARDS: rewards}.items()}

    def with_advantages(self, batches: Sequence[Batch], *, of_batch: Tensor | None = None) -> list[Batch]:
        """Returns batches with the advantages of their completions.

        of_batch: the rewards of the global batch, [all completions]; None where these batches are it.
        """
        every = torch.cat([batch[REWARDS].flatten() for batch in batches]) if of_batch is None else of_batch
        return [
            {**batch, ADVANTAGES: self.function.advantages(batch[REWARDS], of_batch=every.to(batch[REWARDS]))}
            for batch in batches
        ]

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


def rollout_of(
    function: LossFunction | None,
    *,
    model: nn.Module,
    tokenizer_dir: Path | None,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    is_trial: bool = False,
    beat: Callable[[], None] = lambda: None,
) -> Rollout | None:
    """Returns the rollout of a job's loss; None for losses that read the samples as they are.

    model: the job's model before its layout. is_trial: completions have the greatest length.
    Raises ValueError where the model cannot generate, or the data has no tokenizer.
    """
    generation = None if function is None else function.generation
    if function is None or generation is None:
        return None
    if not hasattr(model, "generate") or not hasattr(model, "generation_config"):
        raise ValueError(
            f"loss {function.name}: {type(model).__name__} has no generate. To fix: train a causal language model of "
            "transformers"
        )
    if tokenizer_dir is None:
        raise ValueError(
            f"loss {function.name}: the data has no tokenizer to read completions with. To fix: give data of kind "
            "prompt"
        )
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)
    return Rollout(
        function=function,
        generation=generation,
        rewards=Rewards(generation),
        tokenizer=tokenizer,
        ends=replace(ends_of(tokenizer, model), are_ignored=is_trial),
        device=device,
        autocast=autocast,
        beat=beat,
    )


def prompts_of(batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Returns the rows of a batch of prompts, by column. Raises ValueError where the data is of another kind."""
    if ROW not in batch:
        raise ValueError("loss: the samples are no prompts. To fix: set data.kind to prompt")
    return [json.loads(bytes(row[row != 0].tolist())) for row in batch[ROW].cpu()]


def ends_of(tokenizer: Any, model: nn.Module) -> Ends:
    """Returns how completions end: by the end of text of the tokenizer or of the model, or by the end of a turn."""
    named: Any = model.generation_config.eos_token_id  # type: ignore[union-attr]
    of_model = list(named) if isinstance(named, (list, tuple)) else [named]
    of_turn = tokenizer.get_vocab().get(TURN_END)
    known = [token for token in (tokenizer.eos_token_id, *of_model, of_turn) if token is not None]
    pad = next((token for token in (tokenizer.pad_token_id, *known) if token is not None), 0)
    return Ends(token_ids=tuple(dict.fromkeys(known)), pad_id=int(pad))


def _sequences(tokens: Sequence[list[int]], written: Sequence[Sequence[list[int]]], *, pad_id: int) -> Batch:
    """Returns prompts with their completions, [prompts, completions, tokens], and the labels of the completions."""
    longest = max(len(prompt) + len(each) for prompt, group in zip(tokens, written, strict=True) for each in group)
    width = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    ids = torch.full((len(tokens), len(written[0]), width), pad_id, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, group) in enumerate(zip(tokens, written, strict=True)):
        for place, completion in enumerate(group):
            end = len(prompt) + len(completion)
            ids[row, place, :end] = torch.tensor(prompt + completion)
            labels[row, place, len(prompt) : end] = torch.tensor(completion)
    return {"input_ids": ids, "labels": labels}
