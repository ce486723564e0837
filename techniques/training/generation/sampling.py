"""Sampling of completions, with random numbers that belong to the prompt and not to where it is answered.

A token is sampled from softmax(logits / T) as the argmax of logits / T - log E, with E exponentially distributed (the
Gumbel-max trick: Maddison et al., A* Sampling, arXiv:1411.0030, section 2). Each prompt draws E from a generator of its
own, so that transformers' `generate` may answer any number of prompts at once, by greedy search on these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ringmaster.techniques.interface.loss import Generation


@dataclass(frozen=True, kw_only=True)
class Ends:
    """How completions end.

    token_ids: a completion ends with the first of them.
    pad_id: fills up shorter completions.
    are_ignored: whether completions have the greatest length whatever they contain, as in trials, whose speed and
        memory must not be underestimated.
    """

    token_ids: tuple[int, ...]
    pad_id: int
    are_ignored: bool = False


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    generation: Generation,
    ends: Ends,
    device: torch.device,
    beat: Callable[[], None] = lambda: None,
) -> list[list[list[int]]]:
    """Returns the tokens of the completions of each prompt, each with the token that ended it, if one did.

    model: a causal language model of transformers; it is in eval mode meanwhile.
    prompts: the tokens of each. seeds: of each prompt's random numbers.
    beat: called before each token.
    """
    number, width = generation.num_generations, max(map(len, prompts))
    tokens = torch.full((len(prompts), width), ends.pad_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):  # on the left, so that all completions begin at one place
        tokens[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    noise = _Noise(seeds, generation=generation, device=device, beat=beat)
    ended = () if ends.are_ignored else ends.token_ids
    config = GenerationConfig(
        max_new_tokens=generation.max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(ended) or None,
        pad_token_id=ends.pad_id,
    )
    was_training = model.training
    model.eval()
    with _without_defaults(model):
        written = model.generate(  # type: ignore[operator]
            tokens.repeat_interleave(number, 0).to(device),
            attention_mask=mask.repeat_interleave(number, 0).to(device),
            generation_config=config,
            logits_processor=LogitsProcessorList([noise]),
        )
    model.train(was_training)
    rows = [_until_end(row, ended) for row in written[:, width:].tolist()]
    return [rows[first : first + number] for first in range(0, len(rows), number)]


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]


@contextmanager
def _without_defaults(model: nn.Module) -> Iterator[None]:
    """Hides the model's own settings of generation, such as penalties: completions are samples of the policy alone."""
    own: Any = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _Noise(LogitsProcessor):  # type: ignore[misc]
    """Divides logits by the temperature and adds Gumbel noise, of which each prompt has a generator."""

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
