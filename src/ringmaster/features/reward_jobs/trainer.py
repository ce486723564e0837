"""Rewards of completions by the reward models of a batch, which run beside the job's own model.

`reward_0`, `reward_1`, ... are the reward functions, in the order of the feature's jobs. Where no job is trained, as in
a probe of a tiny step, all completions have the reward 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ringmaster.compat.transformers import MODEL_CONSTRUCTION
from ringmaster.features.reward_jobs.job import RewardJobs
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.sources.completion import answer_context, answer_tokens
from ringmaster.techniques.job_features import MAX_WHOLE
from ringmaster.techniques.model_facts import num_positions
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.processes.order import TRIAL
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback

ROWS_AT_ONCE = 16
"""The completions of a forward of a reward model."""

_models: list[RewardModel] = []


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A frozen reward model, and the tokenizer of what it was trained on."""

    model: nn.Module
    context: SampleContext
    device: torch.device

    @classmethod
    def read(cls, model: nn.Module, folder: Path, *, device: torch.device) -> RewardModel:
        """Returns a model that reads text by the tokenizer in a folder."""
        context = answer_context(folder, max_length=num_positions(model.config) or MAX_WHOLE)
        return cls(model=model.eval().requires_grad_(False).to(device), context=context, device=device)

    @torch.no_grad()
    def rewards(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Returns the reward of each completion: the output for the tokens that rows of kind comparison have."""
        tokens = [self._tokens(*pair) for pair in zip(prompts, completions, strict=True)]
        order, result = sorted(range(len(tokens)), key=lambda i: len(tokens[i])), [0.0] * len(tokens)
        for chosen in (order[first : first + ROWS_AT_ONCE] for first in range(0, len(order), ROWS_AT_ONCE)):
            outputs = self.model(**self._inputs([tokens[i] for i in chosen])).logits[:, 0].float().tolist()
            for i, reward in zip(chosen, outputs, strict=True):
                result[i] = reward
        return result

    def _tokens(self, prompt: Any, completion: Any) -> list[int]:
        return answer_tokens(prompt, completion, self.context)["input_ids"][: self.context.max_length]

    def _inputs(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        width, pad_id = max(map(len, rows)), self.context.tokenizer.pad_id
        ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], device=self.device)
        lengths = torch.tensor([[len(row)] for row in rows], device=self.device)
        return {"input_ids": ids, "attention_mask": (torch.arange(width, device=self.device) < lengths).long()}


class RewardJobsCallback(TrainerCallback):
    """Reads the reward models of a job, before completions are written."""

    def __init__(self, context: JobContext) -> None:
        """Reads them. Raises ValueError where one is not known."""
        super().__init__(context)
        _models[:] = _read(context)

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job has reward models."""
        return context.job.feature(RewardJobs) is not None


def _read(context: JobContext) -> Iterator[RewardModel]:
    from transformers import AutoModelForSequenceClassification

    feature = context.job.feature(RewardJobs)
    assert feature is not None, "as is_for says"
    for number, name in enumerate(feature.jobs):
        device, location = context.ranks.device, context.order.parents.get(name)
        if location is not None:
            folder = Path(location)
            with MODEL_CONSTRUCTION:
                model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
            yield RewardModel.read(model, folder, device=device)
        elif context.order.purpose == TRIAL and context.prepared.tokenizer_dir is not None:
            # Before it is trained, a fresh one is as fast, and needs as much memory.
            model = build_model(feature.models[number], data=context.prepared, seed=context.job.seed)
            yield RewardModel.read(model, context.prepared.tokenizer_dir, device=device)
        else:
            raise ValueError(
                f"loss.rewards: the model of job {name} is not there. To fix: run the batch that trains it, or give "
                "other rewards"
            )


@dataclass(frozen=True)
class JobReward:
    """The reward function of one of the reward models, by its number."""

    why_in_training_alone: ClassVar[str] = (
        "the reward model of another job is there in training alone. To fix: read the reward that the job's own "
        "evaluation recorded, or evaluate the model on other data"
    )
    number: int

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Returns the reward of each completion."""
        return _models[self.number].rewards(prompts, completions) if _models else [0.0] * len(completions)


def __getattr__(name: str) -> Any:
    match = re.fullmatch(r"reward_(\d+)", name)
    if match is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return JobReward(int(match[1]))


TRAINER_CALLBACKS = (RewardJobsCallback,)
