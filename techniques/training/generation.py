"""What models write: the sequences on which a loss is computed, and answers to held-out rows for metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ringmaster.features import listed
from ringmaster.techniques.job_specs import EvaluationSpec
from ringmaster.techniques.metric import IGNORED, ModelMetric, answer_of, metrics_named
from ringmaster.techniques.model_facts import default_loss, num_positions
from ringmaster.techniques.models.architectures import PIXELS
from ringmaster.techniques.training.token_sampling import Beating, EndTokens, encodes, end_tokens_of, sample


@dataclass(frozen=True, kw_only=True)
class WriterContext:
    """The model that writes, and how.

    model: before its layout. tokenizer_dir: the folder of the data's tokenizer, if it has one.
    autocast: returns the context of the job's precision.
    is_trial: whether what is written has the greatest length.
    is_trained: whether the job is trained; otherwise a finished model is scored.
    beat: called before each token.
    """

    model: nn.Module
    tokenizer_dir: Path | None
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    is_trial: bool = False
    is_trained: bool = True
    beat: Callable[[], None] = lambda: None

    def check_generates(self, what: str) -> None:
        """Raises ValueError where the model cannot write for something, which the message names."""
        if not hasattr(self.model, "generate") or not hasattr(self.model, "generation_config"):
            raise ValueError(
                f"{what}: {type(self.model).__name__} has no generate. To fix: train a language model of transformers"
            )

    @property
    def tokenizer(self) -> Any:
        """The data's tokenizer; None where it has none."""
        return None if self.tokenizer_dir is None else _tokenizer_of(self.tokenizer_dir)

    @property
    def ends(self) -> EndTokens:
        """How what the model writes ends."""
        return replace(end_tokens_of(self.tokenizer, self.model), are_ignored=self.is_trial)


class SequenceWriter(ABC):
    """Writes, with the model in training, the sequences on which a loss is computed, to samples of the data.

    Their random numbers depend on the seed, the step and the sample's place in the global batch alone.
    """

    @abstractmethod
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
        """Returns the micro-batches of a rank's share of a step, on the device, and the mean reward, if they have any.

        model: the whole model, as it is called by `generate`. samples: of each micro-batch. places: of these, in the
        global batch. gather: `RankContext.gather`.
        """

    @abstractmethod
    def held_out_batch(
        self, model: nn.Module, samples: dict[str, Tensor], *, seed: int, rows: Sequence[int]
    ) -> dict[str, Tensor]:
        """Returns what is evaluated of some held-out rows, with the same random numbers at every step."""


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
        for write in listed("trainer", "ANSWER_WRITERS"):
            if (written := write(self, model, batch)) is not None:
                return cast(list[list[int]], written)
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
        with self.autocast():
            groups = sample(
                model, prompts, max_new_tokens=most, ends=self.ends, device=self.device, processor=Beating(self.beat)
            )
        return [row for (row,) in groups]

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


def answer_writer_of(evaluation: EvaluationSpec, context: WriterContext) -> AnswerWriter | None:
    """Returns what writes for the metrics of an evaluation; None where none reads what a model writes.

    Raises ValueError where the model cannot generate.
    """
    if default_loss(type(context.model).__name__) is not None:  # it reads what the model writes of its output
        return None
    reading = [m for m in metrics_named(evaluation.metrics) if m.generates and not isinstance(m, ModelMetric)]
    if not reading:
        return None
    context.check_generates(f"metric {reading[0].name}")
    return AnswerWriter(
        max_new_tokens=evaluation.max_new_tokens,
        ends=context.ends,
        device=context.device,
        autocast=context.autocast,
        beat=context.beat,
    )


@contextmanager
def beating(model: nn.Module, beat: Callable[[], None]) -> Iterator[None]:
    """Calls `beat` before each forward of a model within the context."""
    hook = model.register_forward_pre_hook(lambda *_: beat())
    try:
        yield
    finally:
        hook.remove()


@cache
def _tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
