"""Sampling for many clients at once: prompts by one forward, and then one token of every sequence at a time.

Each sequence draws from a generator of its own, and the kernels see its rows as in training (`row_blocks`), so what a
client samples depends on its weights, prompt, settings and seed, and not on who else samples.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ringmaster.features.endpoint.compute.cached_sequences import CachedAttention, CachedSequences
from ringmaster.features.endpoint.compute.requests import SampledSequence, SampleResult, SamplingRequest, TokenLogprobs
from ringmaster.features.endpoint.compute.row_blocks import PADDING, PaddedLength
from ringmaster.features.endpoint.compute.token_losses import logprobs_of
from ringmaster.techniques.multi_adapter.adapter_batches import AdapterBatch
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase
from ringmaster.techniques.training.token_sampling import prompt_seed

MAX_SEQUENCES, MAX_PROMPT_TOKENS = 256, 8192
"""The most sequences, and tokens of prompts, that are computed at once; a request stays whole."""
NO_ADAPTER = AdapterModules()
TEXT_MARGIN = 16
"""How many tokens more than the characters of a text are read to find it at the end of a sequence."""

StopTest = Callable[[Sequence[int]], bool]
"""Returns whether a sequence ends with the given tokens."""


def sampling_obstacle(request: SamplingRequest, *, has_tokenizer: bool, num_tokens: int) -> str | None:
    """Returns why sequences cannot be sampled with these settings. num_tokens: of the base's vocabulary."""
    if not 0.0 <= request.temperature < float("inf"):
        return f"temperature is {request.temperature}. To fix: take one of at least 0"
    if not 0.0 < request.top_p <= 1.0:
        return f"top_p is {request.top_p}. To fix: take one above 0, and at most 1"
    if request.top_k < -1:
        return f"top_k is {request.top_k}. To fix: take a number of tokens, or -1 for all"
    if request.num_samples < 1 or (request.max_tokens or 0) < 0 or request.topk_prompt_logprobs < 0:
        return "num_samples, max_tokens or topk_prompt_logprobs is too small. To fix: take at least 1 sample"
    if request.topk_sample_logprobs < 0 or request.prompt_alt_tokens < 0:
        return "topk_sample_logprobs or prompt_alt_tokens is negative. To fix: take at least 0"
    targets = request.target_prompt_tokens
    if targets is not None and (len(targets) != len(request.prompt) - 1 or len({*map(len, targets)}) > 1):
        return "target_prompt_tokens has not as many tokens for each place of the prompt but the first"
    if targets is not None and any(not -1 <= token < num_tokens for place in targets for token in place):
        return f"target_prompt_tokens has tokens that the base does not know: it has {num_tokens}"
    if not has_tokenizer and any(isinstance(each, str) for each in request.stop or ()):
        return "stop is a text, and the base has no tokenizer. To fix: give the tokens of the text"
    return None


@dataclass(eq=False)
class _Sequence:
    """A sequence that is being sampled. stop_reason: why it has ended; None while it goes on."""

    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: str | None = None


@dataclass(eq=False)
class OpenSample:
    """A request, its sequences, and the keys and values of those that go on. seed: the request's, or a drawn one."""

    request: SamplingRequest
    modules: AdapterModules
    seed: int
    max_tokens: int
    ends: StopTest
    sequences: list[_Sequence]
    cached: CachedSequences
    is_read: bool = False
    prompt_logprobs: tuple[float | None, ...] | None = None
    topk: tuple[TokenLogprobs | None, ...] | None = None
    targets: tuple[tuple[float, ...], ...] | None = None
    alternatives: tuple[TokenLogprobs, ...] | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether anything was asked of the places of the prompt."""
        request = self.request
        is_asked = request.with_prompt_logprobs or request.topk_prompt_logprobs or request.prompt_alt_tokens
        return bool(is_asked) or request.target_prompt_tokens is not None

    @property
    def live(self) -> list[_Sequence]:
        """The sequences that go on."""
        return [each for each in self.sequences if each.stop_reason is None]

    def take(self, logits: Tensor) -> None:
        """Samples the next token of each sequence that goes on, from logits [sequences, vocabulary]."""
        live = self.live
        draws = torch.cat([torch.rand(1, generator=each.generator, dtype=torch.float64) for each in live])
        tokens = choose(logits, self.request, draws.unsqueeze(-1).to(logits.device)).squeeze(-1)
        logprobs = logprobs_of(logits, tokens)
        topk = _most_probable(logits, self.request.topk_sample_logprobs)
        for i, (each, token, logprob) in enumerate(zip(live, tokens.tolist(), logprobs.tolist(), strict=True)):
            each.tokens.append(token)
            each.logprobs.append(logprob)
            each.topk += topk[i : i + 1]
            if self.ends(each.tokens):
                each.stop_reason = "stop"
            elif len(each.tokens) >= self.max_tokens:
                each.stop_reason = "length"
        self.cached.keep([i for i, each in enumerate(live) if each.stop_reason is None])

    def result(self) -> SampleResult:
        """The sequences."""
        return SampleResult(
            sequences=tuple(
                SampledSequence(
                    tokens=tuple(each.tokens),
                    logprobs=tuple(each.logprobs),
                    stop_reason=each.stop_reason or "length",
                    topk_logprobs=tuple(each.topk) if self.request.topk_sample_logprobs else None,
                )
                for each in self.sequences
            ),
            prompt_logprobs=self.prompt_logprobs,
            topk_prompt_logprobs=self.topk,
            target_prompt_logprobs=self.targets,
            prompt_alt_tokens=self.alternatives,
        )


class TokenSampler:
    """Samples from a base with adapters. seq_len: the most tokens of a prompt with what follows it."""

    def __init__(
        self, stem: MultiAdapterBase, *, padded: PaddedLength, seq_len: int, tokenizer_from: str | None
    ) -> None:
        self._stem, self._padded, self._seq_len, self._tokenizer_from = stem, padded, seq_len, tokenizer_from
        self._device = next(stem.model.parameters()).device

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the base; None where it has none."""
        from transformers import AutoTokenizer

        if self._tokenizer_from is None:
            return None
        try:
            return AutoTokenizer.from_pretrained(self._tokenizer_from)
        except (OSError, ValueError):  # the folder holds none
            return None

    @torch.no_grad()
    def go_on(self, samples: Sequence[OpenSample], *, num_tokens: int) -> None:
        """Samples up to `num_tokens` further tokens of each sequence that goes on; prompts are read before.

        A sample has the bits that it has at once, however it is divided.
        """
        for chosen in in_chunks([each for each in samples if not each.is_read], padded=self._padded):
            self._read_prompts(chosen)
        stops = {each: len(each.live[0].tokens) + num_tokens for each in samples if each.live}
        while live := [each for each, stop in stops.items() if each.live and len(each.live[0].tokens) < stop]:
            for chosen in in_chunks(live, padded=self._padded):
                self._sample_tokens(chosen)

    def begun(self, request: SamplingRequest, modules: AdapterModules) -> OpenSample:
        """Returns a sample of which nothing is computed yet."""
        room = self._seq_len - len(request.prompt)
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        generators = [
            torch.Generator().manual_seed(prompt_seed(seed, "samples", i)) for i in range(request.num_samples)
        ]
        reason = None if max_tokens else "length"
        return OpenSample(
            request=request,
            modules=modules,
            seed=seed,
            max_tokens=max_tokens,
            ends=self._stop_test(request),
            sequences=[_Sequence(generator=each, stop_reason=reason) for each in generators],
            cached=CachedSequences(num_rows=request.num_samples, capacity=len(request.prompt) + max_tokens),
        )

    def _read_prompts(self, prompts: Sequence[OpenSample]) -> None:
        """Computes the prompts, and samples the first token of each sequence."""
        lengths = [self._padded.of(len(each.request.prompt)) for each in prompts]
        tokens = [
            torch.tensor(
                [[*each.request.prompt, *[PADDING] * (length - len(each.request.prompt))]], device=self._device
            )
            for each, length in zip(prompts, lengths, strict=True)
        ]
        parts = [
            AdapterBatch(adapter_modules=each.modules, inputs={"input_ids": own})
            for each, own in zip(prompts, tokens, strict=True)
        ]
        attention = CachedAttention(
            [each.cached for each in prompts],
            shapes=[(1, length) for length in lengths],
            nums=[len(each.request.prompt) for each in prompts],
        )
        positions = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        states = torch.split(self._stem.hidden_states(parts, positions=positions, attention=attention), lengths)
        attention.finish()
        for each, part, own in zip(prompts, parts, states, strict=True):
            each.is_read = True
            if each.scores_prompt:
                _note_prompt(each, self._stem.logits(own, [part]))
        going = [i for i, each in enumerate(prompts) if each.live]
        if not going:
            return
        last = torch.stack([states[i][len(prompts[i].request.prompt) - 1] for i in going])
        ends = [torch.zeros((1, 1), dtype=torch.int64, device=self._device) for _ in going]
        logits = self._logits(last, [prompts[i] for i in going], ends)
        for i, own_logits in zip(going, logits, strict=True):
            prompts[i].take(own_logits.expand(len(prompts[i].live), -1))

    def _sample_tokens(self, prompts: Sequence[OpenSample]) -> None:
        """Computes the last token of every sequence that goes on, and samples the one behind it."""
        tokens = [torch.tensor([[each.tokens[-1]] for each in prompt.live], device=self._device) for prompt in prompts]
        parts, num_added = self._filled_up(prompts, tokens)
        filling = [CachedSequences(num_rows=num_added, capacity=0)] if num_added else []
        cached = [*(prompt.cached for prompt in prompts), *filling]
        attention = CachedAttention(cached, shapes=[(each.num_rows, 1) for each in cached], nums=[1 for _ in cached])
        positions = torch.cat([torch.full((each.num_rows,), each.length, device=self._device) for each in cached])
        states = self._stem.hidden_states(parts, positions=positions, attention=attention)
        attention.finish()
        logits = self._stem.logits(states, parts)
        for prompt, own in zip(prompts, torch.split(logits, [part.num_rows for part in parts]), strict=False):
            prompt.take(own)

    def _logits(self, states: Tensor, prompts: Sequence[OpenSample], tokens: Sequence[Tensor]) -> Sequence[Tensor]:
        """The logits of one state of each prompt, [prompts, vocabulary]."""
        parts, num_added = self._filled_up(prompts, tokens)
        filled = torch.cat([states, states.new_zeros(num_added, states.shape[1])])
        return torch.split(self._stem.logits(filled, parts)[: len(states)], 1)

    def _filled_up(self, prompts: Sequence[OpenSample], tokens: Sequence[Tensor]) -> tuple[list[AdapterBatch], int]:
        """Parts of one token a row, filled up to so many rows that a row's bits are its own; and the rows added."""
        parts = [
            AdapterBatch(adapter_modules=prompt.modules, inputs={"input_ids": own})
            for prompt, own in zip(prompts, tokens, strict=True)
        ]
        num_added = -sum(part.num_rows for part in parts) % self._padded.multiple
        if num_added:
            filling = torch.full((num_added, 1), PADDING, device=self._device)
            parts.append(AdapterBatch(adapter_modules=NO_ADAPTER, inputs={"input_ids": filling}))
        return parts, num_added

    def _stop_test(self, request: SamplingRequest) -> StopTest:
        sequences: list[tuple[int, ...]] = []
        texts: list[str] = []
        if request.stop is None:
            config: Any = getattr(self._stem.model, "generation_config", None) or self._stem.model.config
            named = config.eos_token_id
            ids = [] if named is None else list(named) if isinstance(named, (list, tuple)) else [named]
            sequences = [(each,) for each in ids]
        else:
            sequences = [tuple(each) for each in request.stop if not isinstance(each, str)]
            texts = [each for each in request.stop if isinstance(each, str)]

        def ends(tokens: Sequence[int]) -> bool:
            if any(each and tuple(tokens[-len(each) :]) == each for each in sequences):
                return True
            return any(
                text in self.tokenizer.decode(tokens[-len(text) - TEXT_MARGIN :], skip_special_tokens=False)
                for text in texts
            )

        return ends


def in_chunks(samples: Sequence[OpenSample], *, padded: PaddedLength) -> Iterator[list[OpenSample]]:
    """Yields samples that are computed at once: few enough sequences and, of prompts that are not read yet, tokens."""
    chunk: list[OpenSample] = []
    for each in samples:
        together = [*chunk, each]
        num_sequences = sum(x.request.num_samples for x in together)
        num_tokens = sum(padded.of(len(x.request.prompt)) for x in together if not x.is_read)
        if chunk and (num_sequences > MAX_SEQUENCES or num_tokens > MAX_PROMPT_TOKENS):
            yield chunk
            chunk = []
        chunk.append(each)
    if chunk:
        yield chunk


def _note_prompt(sample: OpenSample, logits: Tensor) -> None:
    """Keeps what was asked of a prompt's places, from logits of at least all of them."""
    request = sample.request
    tokens = torch.tensor(request.prompt[1:], device=logits.device, dtype=torch.int64)
    logits = logits[: len(tokens)]
    if request.with_prompt_logprobs:
        sample.prompt_logprobs = (None, *logprobs_of(logits, tokens).tolist())
    if request.topk_prompt_logprobs:
        sample.topk = (None, *_most_probable(logits, request.topk_prompt_logprobs))
    if request.target_prompt_tokens is not None:
        sample.targets = _logprobs_of_targets(logits, request.target_prompt_tokens)
    if request.prompt_alt_tokens:
        sample.alternatives = _alternatives(logits, request, seed=sample.seed)


def _most_probable(logits: Tensor, num: int) -> list[TokenLogprobs]:
    """The `num` most probable tokens of each row; no rows for none."""
    if not num:
        return []
    values, ids = logits.log_softmax(-1).topk(min(num, logits.shape[-1]), dim=-1)
    return [tuple(zip(*each, strict=True)) for each in zip(ids.tolist(), values.tolist(), strict=True)]


def _logprobs_of_targets(logits: Tensor, targets: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
    if not targets:
        return ()
    tokens = torch.tensor(targets, device=logits.device, dtype=torch.int64)
    logprobs = logits.log_softmax(-1).gather(-1, tokens.clamp(min=0)).masked_fill(tokens < 0, 0.0)
    return tuple(map(tuple, logprobs.tolist()))


def _alternatives(logits: Tensor, request: SamplingRequest, *, seed: int) -> tuple[TokenLogprobs, ...]:
    """Draws tokens in each place, with replacement, from the distribution at the request's temperature."""
    settings = replace(request, top_k=-1, top_p=1.0)
    generator = torch.Generator().manual_seed(prompt_seed(seed, "alternatives", 0))
    draws = torch.rand(len(logits), request.prompt_alt_tokens, generator=generator, dtype=torch.float64)
    tokens = choose(logits, settings, draws.to(logits.device))
    logprobs = logits.log_softmax(-1).gather(-1, tokens)
    return tuple(tuple(zip(*each, strict=True)) for each in zip(tokens.tolist(), logprobs.tolist(), strict=True))


def choose(logits: Tensor, request: SamplingRequest, draws: Tensor) -> Tensor:
    """Returns tokens [rows, n] from logits [rows, vocabulary]: those at which the cumulated probability passes a draw.

    The most probable `top_k` tokens are kept, and of these the fewest whose probabilities add up to `top_p`.

    draws: [rows, n], each of at least 0 and less than 1.
    """
    if request.temperature == 0.0:
        return logits.argmax(-1, keepdim=True).expand(draws.shape)
    least_temperature = torch.finfo(logits.dtype).tiny  # below it, the quotients would not be numbers
    scaled = (logits - logits.amax(-1, keepdim=True)) / max(request.temperature, least_temperature)
    if 0 < request.top_k < logits.shape[-1]:
        least = scaled.topk(request.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    probabilities = scaled.softmax(-1).double()
    if request.top_p < 1.0:
        falling, order = probabilities.sort(dim=-1, descending=True, stable=True)
        is_left_out = falling.cumsum(-1) - falling >= request.top_p
        probabilities = probabilities.masked_fill(is_left_out.gather(-1, order.argsort(-1)), 0.0)
    cumulated = probabilities.cumsum(-1)
    passed = draws * cumulated[:, -1:] * (1.0 - 1e-12)  # never the sum itself, where no token is
    tokens = torch.searchsorted(cumulated, passed, right=True)
    return tokens.clamp(max=logits.shape[-1] - 1)  # where logits are not numbers
