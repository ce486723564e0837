"""Training on completions that the model itself writes: their rewards, and the batch made of them.

Rewards are a user's functions, called as TRL's trainers call them.
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
from transformers import LogitsProcessorList

from ringmaster.codec import digest
from ringmaster.registry import resolve
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.sources.completion import PROMPT, ROW, answer_context, answer_tokens
from ringmaster.techniques.job_features import MAX_WHOLE
from ringmaster.techniques.job_specs import EvaluationSpec
from ringmaster.techniques.loss import ADVANTAGES, REWARDS, Generation, LossFunction
from ringmaster.techniques.metric import IGNORED, ModelMetric, metrics_named
from ringmaster.techniques.metrics.token_sequences import answer_of
from ringmaster.techniques.model_facts import CTC_SUFFIX, num_positions
from ringmaster.techniques.models.architectures import PIXELS
from ringmaster.techniques.training.token_sampling import EndTokens, GumbelNoise, encodes, end_tokens_of, sample

WIDTH_MULTIPLE = 8
SPEECH_INPUTS = frozenset({"input_features", "input_values"})
"""The names of what models of speech read."""
MAX_START_TOKENS = 4
"""The most tokens before a text: start, language, task and that there are no timestamps."""
NUM_SHARES = 1 << 32
COMPLETION = "completion"
"""The column of completions, for losses that do not train on those that the model writes in all steps."""

Batch = dict[str, Tensor]


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
        if not encodes(model):
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
        watch = GumbelNoise(None, generation=greedy, device=self.device, beat=self.beat)
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
        if has is None or encodes(model):
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


@cache
def _tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


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
