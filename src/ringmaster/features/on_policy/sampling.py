"""Sampling of the tokens of completions.

A token is sampled from softmax(logits / T) as the argmax of logits / T - log E, with E exponentially distributed (the
Gumbel-max trick: Maddison et al., A* Sampling, arXiv:1411.0030, section 2). Each prompt draws E from a generator of its
own, so that transformers' `generate` may answer any number of prompts at once, by greedy search on these sums.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from ringmaster.features.on_policy.loss import Generation
from ringmaster.techniques.training.token_sampling import EndTokens, sample


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
