"""Training on completions that the model itself writes: their sampling, their rewards, and the batch made of them.

A token is sampled from softmax(logits / T) as the argmax of logits / T - log E, with E exponentially distributed (the
Gumbel-max trick: Maddison et al., A* Sampling, arXiv:1411.0030, section 2). Each prompt draws E from a generator of its
own, so that transformers' `generate` may answer any number of prompts at once, by greedy search on these sums. Rewards
are a user's functions, called as TRL's trainers call them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ringmaster.codec import digest
from ringmaster.registry import resolve
from ringmaster.techniques.data.chat_template import ChatTemplate, TurnEnd
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.sources.comparison import answer_context, answer_tokens
from ringmaster.techniques.data.sources.completion import PROMPT, ROW
from ringmaster.techniques.job_features import MAX_WHOLE
from ringmaster.techniques.job_specs import EvaluationSpec
from ringmaster.techniques.loss import ADVANTAGES, REWARDS, Generation, LossFunction
from ringmaster.techniques.metric import IGNORED, ModelMetric, metrics_named
from ringmaster.techniques.metrics.token_sequences import answer_of
from ringmaster.techniques.model_facts import CTC_SUFFIX, num_positions
from ringmaster.techniques.models.architectures import PIXELS

WIDTH_MULTIPLE = 8
SPEECH_INPUTS = frozenset({"input_features", "input_values"})
"""The names of what models of speech read."""
MAX_START_TOKENS = 4
"""The most tokens before a text: start, language, task and that there are no timestamps."""
NUM_SHARES = 1 << 32
COMPLETION = "completion"
"""The column of completions, for losses that do not train on those that the model writes in all steps."""
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
    context: with which the completions of rows are encoded.
    autocast: returns the context of the job's precision.
    """

    function: LossFunction
    generation: Generation
    rewards: Rewards
    tokenizer: Any
    context: SampleContext
    ends: EndTokens
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    beat: Callable[[], None] = lambda: None

    def completed(self, model: nn.Module, prompts: Mapping[str, Tensor], *, seeds: Sequence[int]) -> Batch:
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
            written = sample(
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

    def given(self, prompts: Mapping[str, Tensor]) -> Batch:
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

    def with_advantages(self, batches: Sequence[Batch], *, of_batch: Tensor | None = None) -> list[Batch]:
        """Returns batches with the advantages of their completions, where these are rewarded.

        of_batch: the rewards of the global batch, [all completions]; None where these batches are it.
        """
        if not self.generation.rewards:
            return list(batches)
        every = torch.cat([batch[REWARDS].flatten() for batch in batches]) if of_batch is None else of_batch
        return [
            {**batch, ADVANTAGES: self.function.advantages(batch[REWARDS], of_batch=every.to(batch[REWARDS]))}
            for batch in batches
        ]

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
    _check_generates(model, f"loss {function.name}")
    if tokenizer_dir is None:
        raise ValueError(
            f"loss {function.name}: the data has no tokenizer to read completions with. To fix: give data of kind "
            "prompt"
        )
    tokenizer = _tokenizer_of(tokenizer_dir)
    return Rollout(
        function=function,
        generation=generation,
        rewards=Rewards(generation),
        tokenizer=tokenizer,
        context=answer_context(tokenizer_dir, max_length=MAX_WHOLE),
        ends=replace(end_tokens_of(tokenizer, model), are_ignored=is_trial),
        device=device,
        autocast=autocast,
        beat=beat,
    )


@dataclass(frozen=True, kw_only=True)
class AnswerWriter:
    """Writes answers to the prompts of held-out rows, for metrics of what a model writes. It takes the likeliest token.

    autocast: returns the context of the job's precision.
    """

    max_new_tokens: int
    ends: EndTokens
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    beat: Callable[[], None] = lambda: None

    def written(self, model: nn.Module, batch: Mapping[str, Tensor]) -> list[list[int]]:
        """Returns the tokens that the model writes to each row, which do not depend on the other rows.

        Raises ValueError where the rows are not prompts with answers.
        """
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if ids is None and labels is not None and SPEECH_INPUTS & batch.keys():
            return self._transcripts(model, batch, labels)
        if ids is None or labels is None or ids.dim() != 2 or labels.dim() != 2 or "position_ids" in batch:
            raise ValueError(f"the samples are not rows of a prompt and an answer. {PROMPTS_REMEDY}")
        if PIXELS in batch:
            raise ValueError(f"answers to images are not written for metrics. {IMAGES_REMEDY}")
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        if not _encodes(model):
            is_labelled = labels != IGNORED
            mask = mask & (is_labelled.cumsum(-1) == 0)
            if bool((is_labelled.any(-1) & ~mask.any(-1)).any()):
                raise ValueError(f"the samples have labels from their first token on, and no prompts. {PROMPTS_REMEDY}")
        longest = self._most_prompt_tokens(model)
        prompts = [
            row[kept].tolist()[-longest:] or [self.ends.pad_id] for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)
        ]
        most = num_expected(labels, self.max_new_tokens) if self.ends.are_ignored else self.max_new_tokens
        greedy = Generation(rewards=(), weights=(), num_generations=1, max_new_tokens=most, temperature=1.0)
        with self.autocast():
            groups = sample(
                model, prompts, seeds=None, generation=greedy, ends=self.ends, device=self.device, beat=self.beat
            )
        return [row for (row,) in groups]

    def _transcripts(self, model: Any, batch: Mapping[str, Tensor], labels: Tensor) -> list[list[int]]:
        """Returns the tokens of recordings, by the model's own settings, which begin as the targets in training do."""
        (name,) = SPEECH_INPUTS & batch.keys()
        most = num_expected(labels, self.max_new_tokens) if self.ends.are_ignored else self.max_new_tokens
        if (positions := getattr(model.config, "max_target_positions", None)) is not None:
            most = min(most, positions - MAX_START_TOKENS)
        greedy = Generation(rewards=(), weights=(), num_generations=1, max_new_tokens=most, temperature=1.0)
        watch = _GumbelNoise(None, generation=greedy, device=self.device, beat=self.beat)
        mask = {key: batch[key].to(self.device) for key in ("attention_mask",) if key in batch}
        was_training = model.training
        model.eval()
        with self.autocast(), torch.no_grad():
            rows = model.generate(
                batch[name].to(self.device),
                max_new_tokens=most,
                min_new_tokens=most if self.ends.are_ignored else None,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                logits_processor=LogitsProcessorList([watch]),
                **mask,
            ).tolist()
        model.train(was_training)
        start, ends = model.generation_config.decoder_start_token_id, {self.ends.pad_id, *self.ends.token_ids}
        rows = [row[1:] if row and row[0] == start else row for row in rows]
        return rows if self.ends.are_ignored else [[*takewhile(lambda token: token not in ends, row)] for row in rows]

    def _most_prompt_tokens(self, model: nn.Module) -> int:
        """Returns of how many tokens, the last ones of a prompt, the model has positions in addition to those of the
        answer."""
        has = num_positions(model.config)
        if has is None or _encodes(model):
            return 0  # all of them
        if has <= self.max_new_tokens:
            raise ValueError(
                f"answers have up to {self.max_new_tokens} tokens, and the model {has} positions. To fix: lower "
                "evaluation.max_new_tokens"
            )
        return has - self.max_new_tokens


def num_expected(labels: Tensor, most: int) -> int:
    """Returns how many tokens a trained model writes to rows together: those of the longest answer, at most `most`."""
    return min(most, max((len(answer_of(row)) for row in labels.tolist()), default=0) or most)


IMAGES_REMEDY = "To fix: name metrics of what the model predicts, such as loss and accuracy"
PROMPTS_REMEDY = "To fix: give data of kind completion, chat or seq2seq without packing, or name other metrics"


def answer_writer_of(
    evaluation: EvaluationSpec,
    *,
    model: nn.Module,
    tokenizer_dir: Path | None,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    is_trial: bool = False,
    beat: Callable[[], None] = lambda: None,
) -> AnswerWriter | None:
    """Returns what writes for the metrics of an evaluation; None where none reads what a model writes.

    Arguments as of `rollout_of`. Raises ValueError where the model cannot generate.
    """
    if type(model).__name__.endswith(CTC_SUFFIX):  # its loss reads what it writes of its output
        return None
    reading = [m for m in metrics_named(evaluation.metrics) if m.generates and not isinstance(m, ModelMetric)]
    if not reading:
        return None
    _check_generates(model, f"metric {reading[0].name}")
    tokenizer = None if tokenizer_dir is None else _tokenizer_of(tokenizer_dir)
    ends = replace(end_tokens_of(tokenizer, model), are_ignored=is_trial)
    return AnswerWriter(
        max_new_tokens=evaluation.max_new_tokens, ends=ends, device=device, autocast=autocast, beat=beat
    )


@contextmanager
def beating(model: nn.Module, beat: Callable[[], None]) -> Iterator[None]:
    """Calls `beat` before each forward of a model within the context."""
    hook = model.register_forward_pre_hook(lambda *_: beat())
    try:
        yield
    finally:
        hook.remove()


def _check_generates(model: nn.Module, what: str) -> None:
    if not hasattr(model, "generate") or not hasattr(model, "generation_config"):
        raise ValueError(
            f"{what}: {type(model).__name__} has no generate. To fix: train a language model of transformers"
        )


def _encodes(model: nn.Module) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


@cache
def _tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def prompts_of(batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Returns the rows of a batch of prompts, by column. Raises ValueError where the data is of another kind."""
    if ROW not in batch:
        raise ValueError("loss: the samples are not prompts. To fix: set data.kind to prompt")
    return [json.loads(bytes(row[row != 0].tolist())) for row in batch[ROW].cpu()]


def end_tokens_of(tokenizer: Any, model: nn.Module) -> EndTokens:
    """Returns how completions end: by the end of text of the tokenizer, if any, or of the model, or of an answer.

    The latter is what the tokenizer's chat template writes behind an answer, which is not always its end of text.
    """
    named: Any = model.generation_config.eos_token_id  # type: ignore[union-attr]
    of_model = list(named) if isinstance(named, (list, tuple)) else [named]
    of_turn = TurnEnd() if tokenizer is None else ChatTemplate(tokenizer).turn_end
    of_text = tokenizer and tokenizer.eos_token_id
    known = [token for token in (of_text, *of_model, *of_turn.token_ids) if token is not None]
    pad = next((token for token in (tokenizer and tokenizer.pad_token_id, *known) if token is not None), 0)
    text = EndText(tokenizer, of_turn) if of_turn.text and of_turn.prompt_end else None
    return EndTokens(token_ids=tuple(dict.fromkeys(known)), pad_id=int(pad), text=text)


def _sequences(
    tokens: Sequence[list[int]],
    written: Sequence[Sequence[list[int]]],
    *,
    is_learnt: Callable[[Sequence[int], Sequence[int]], bool],
    pad_id: int,
) -> Batch:
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


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """How completions end.

    token_ids: a completion ends with the first of them.
    pad_id: fills up shorter completions.
    text: a text that ends the answers of conversations, if any.
    are_ignored: whether completions have the greatest length whatever they contain, as in trials, whose speed and
        memory must not be underestimated. Answers to held-out prompts then have the length of the true ones, as the
        model is not trained.
    """

    token_ids: tuple[int, ...]
    pad_id: int
    text: EndText | None = None
    are_ignored: bool = False

    def end(self, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        """Returns whether a completion of a prompt has an end."""
        by_text = self.text is not None and self.text.suits(prompt) and self.text.is_in(completion)
        return by_text or completion[-1] in self.token_ids


class EndText:
    """A text that ends answers where a chat template writes no token for that."""

    def __init__(self, tokenizer: Any, end: TurnEnd) -> None:
        self._tokenizer, self._prompt_end = tokenizer, list(end.prompt_end)
        # As the tokenizer writes a text that it has read.
        self._text = self._decoded(tokenizer(end.text, add_special_tokens=False)["input_ids"])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)).strip()

    def suits(self, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt ends as those of conversations do."""
        return list(prompt[-len(self._prompt_end) :]) == self._prompt_end

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Returns whether the last of some tokens have the text."""
        return self._text in self._decoded(tokens[-4 * len(self._text) :])  # a character has at most four tokens


class _TextCriteria(StoppingCriteria):  # type: ignore[misc]
    """Ends completions at texts. texts: of each sequence, if any. width: of the prompts."""

    def __init__(self, texts: Sequence[EndText | None], width: int) -> None:
        self._texts, self._width = texts, width

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns which sequences are complete, [sequences]."""
        rows = zip(input_ids[:, self._width :].tolist(), self._texts, strict=True)
        are_complete = [text is not None and text.is_in(row) for row, text in rows]
        return torch.tensor(are_complete, device=input_ids.device)


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] | None,
    generation: Generation,
    ends: EndTokens,
    device: torch.device,
    beat: Callable[[], None] = lambda: None,
) -> list[list[list[int]]]:
    """Returns the tokens of the completions of each prompt, each with the token that ended it, if one did.

    model: a language model of transformers; it is in eval mode meanwhile.
    prompts: the tokens of each. seeds: of each prompt's random numbers; None for the likeliest tokens.
    beat: called before each token.
    """
    number, width = generation.num_generations, max(map(len, prompts))
    tokens = torch.full((len(prompts), width), ends.pad_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        # Filled up on the left, so that all completions begin at one place; what an encoder reads as in training, on
        # the right, as its positions may be counted from the first token of the row.
        first = 0 if _encodes(model) else width - len(prompt)
        tokens[row, first : first + len(prompt)] = torch.as_tensor(prompt)
        mask[row, first : first + len(prompt)] = 1
    noise = _GumbelNoise(seeds, generation=generation, device=device, beat=beat)
    ended = () if ends.are_ignored else ends.token_ids
    config = GenerationConfig(
        max_new_tokens=generation.max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(ended) or None,
        pad_token_id=ends.pad_id,
    )
    if _encodes(model):
        settings: list[Any] = [model.generation_config, model.config]
        firsts = (getattr(each, "decoder_start_token_id", None) for each in settings)
        config.decoder_start_token_id = next((first for first in firsts if first is not None), None)
        config.forced_bos_token_id = settings[0].forced_bos_token_id
        width = 1  # the decoder's first token
    text = None if ends.are_ignored else ends.text
    by_text = [text if text is not None and text.suits(prompt) else None for prompt in prompts for _ in range(number)]
    criteria = [_TextCriteria(by_text, width)] if any(by_text) else []
    was_training = model.training
    model.eval()
    with _without_defaults(model):
        written = model.generate(  # type: ignore[operator]
            tokens.repeat_interleave(number, 0).to(device),
            attention_mask=mask.repeat_interleave(number, 0).to(device),
            generation_config=config,
            logits_processor=LogitsProcessorList([noise]),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
    model.train(was_training)
    rows = []
    for row, own in zip(written[:, width:].tolist(), by_text, strict=True):
        is_end = (token in ended or (own is not None and own.is_in(row[: i + 1])) for i, token in enumerate(row))
        last = next((place for place, ends_here in enumerate(is_end) if ends_here), len(row) - 1)
        rows.append(row[: last + 1])
    return [rows[first : first + number] for first in range(0, len(rows), number)]


@contextmanager
def _without_defaults(model: nn.Module) -> Iterator[None]:
    """Hides the model's own settings of generation, such as penalties: completions are samples of the policy alone."""
    own: Any = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _GumbelNoise(LogitsProcessor):  # type: ignore[misc]
    """Divides logits by the temperature and adds Gumbel noise, of which each prompt has a generator, if any."""

    def __init__(
        self, seeds: Sequence[int] | None, *, generation: Generation, device: torch.device, beat: Callable[[], None]
    ) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds or ()]
        self._generation, self._beat = generation, beat

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores [sequences, vocabulary] whose argmax is a sample."""
        self._beat()
        if not self._generators:
            return scores
        shape = (self._generation.num_generations, scores.shape[-1])
        drawn = [torch.empty(shape, device=scores.device).exponential_(generator=each) for each in self._generators]
        smallest = torch.finfo(torch.float32).tiny
        return scores.float() / self._generation.temperature - torch.cat(drawn).clamp_(min=smallest).log_()


Reward = Callable[..., Any]


class Rewards:
    """The weighted sum of the rewards of several functions. Raises ValueError where one of them is not found."""

    def __init__(self, generation: Generation) -> None:
        self._functions = [(name, resolve(name)) for name in generation.rewards]
        self._weights = generation.weights

    def check_without_training(self) -> None:
        """Raises ValueError where a function needs what is there in training alone, as its attribute says."""
        for _, function in self._functions:
            if reason := getattr(function, "why_in_training_alone", ""):
                raise ValueError(f"loss.rewards: {reason}")

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Tensor:
        """Returns the reward of each completion, [completions] in fp32; NaN where every function returned None.

        prompts, completions: texts, or lists of messages. completion_ids: the completions' tokens.
        columns: the other columns of the prompts' rows, by name; all of them have a value for each completion.
        """
        known = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        every = torch.tensor(
            [rewards_by(name, function, known, number=len(completions)) for name, function in self._functions]
        )
        summed = (every * torch.tensor(self._weights)[:, None]).nansum(0)
        return summed.masked_fill(every.isnan().all(0), math.nan)


def rewards_by(name: str, function: Reward, known: Mapping[str, Any], *, number: int) -> list[float]:
    """Returns the rewards of one function; NaN for None. Raises ValueError where it returns anything else.

    known: the arguments, by name; those that the function does not take are left out.
    """
    returned = function(**_taken(name, function, known))
    remedy = "To fix: return a list with a number, or None, for each completion"
    if inspect.isawaitable(returned):
        raise ValueError(f"loss.rewards: {name} is asynchronous. To fix: define it without async")
    if not isinstance(returned, (list, tuple)) and not hasattr(returned, "tolist"):
        raise ValueError(f"loss.rewards: {name} returned {type(returned).__name__}. {remedy}")
    values = returned if isinstance(returned, (list, tuple)) else returned.tolist()
    if not isinstance(values, (list, tuple)) or len(values) != number:
        shown = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
        raise ValueError(f"loss.rewards: {name} returned {shown} for {number} completions. {remedy}")
    return [_number(name, value, remedy) for value in values]


def _number(name: str, value: Any, remedy: str) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"loss.rewards: {name} returned {value!r:.60} for a completion. {remedy}")
    return number


def _taken(name: str, function: Reward, known: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a C function, whose arguments cannot be inspected
        return dict(known)
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return dict(known)
    missing = [each.name for each in parameters if each.default is inspect.Parameter.empty and each.name not in known]
    if missing:
        raise ValueError(
            f"loss.rewards: {name} expects {', '.join(missing)}; available columns: {', '.join(sorted(known))}. "
            "To fix: use columns of the data, prompts, completions or completion_ids"
        )
    return {each.name: known[each.name] for each in parameters if each.name in known}
