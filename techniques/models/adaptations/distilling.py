"""Distillation: a student learns from the logits of a frozen teacher, besides the labels.

With student logits z, teacher logits v, temperature T and weight w, over the rows or tokens that have a label:

    loss = (1 - w) CE(z, label) + w T^2 KL(softmax(v / T) || softmax(z / T))

Source: Hinton et al., Distilling the Knowledge in a Neural Network (arXiv:1503.02531), section 2: T^2 keeps the
gradients of both parts comparable.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ringmaster.techniques.interface.job import AdaptationSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.training.losses import (
    Batch,
    Loss,
    SumAndCount,
    classification_loss,
    logits_of,
    next_token_loss,
    next_tokens,
)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A frozen model, and the loss that selects its inputs from a batch.

    autocast: returns the context of the student's precision, in which the teacher computes too.
    """

    model: nn.Module
    loss: Loss
    autocast: Callable[[], AbstractContextManager[Any]]

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor | None:
        """Returns the teacher's logits for a batch."""
        with self.autocast():
            return logits_of(self.model(**self.loss.forward_inputs(batch)))


def distilled_loss(loss: Loss, teacher: Teacher, said: AdaptationSpec) -> Loss:
    """Returns the distillation loss of a student whose loss without a teacher is `loss`.

    Raises ValueError where `loss` is no cross entropy, as then the two losses would not cover the same rows.
    """
    if loss.compute not in (next_token_loss, classification_loss):
        raise ValueError(
            "distillation: the model's loss is no cross entropy of ours. "
            "To fix: distill a causal language model or a classifier of transformers"
        )

    def compute(output: Any, batch: Batch) -> SumAndCount:
        total, count = loss(output, batch)
        return (1 - said.weight) * _whole(total) + said.weight * divergence(output, batch), count

    def divergence(output: Any, batch: Batch) -> Tensor:
        students, teachers = logits_of(output), teacher.logits(batch)
        if students is None or teachers is None:
            raise ValueError("distillation: a model gives no logits. To fix: distill between models that do")
        students, teachers = _whole(students), _whole(teachers)
        if students.shape != teachers.shape:
            raise ValueError(
                f"distillation: the student's logits are {list(students.shape)} and the teacher's "
                f"{list(teachers.shape)}. To fix: give both the same vocabulary or labels"
            )
        labels = next_tokens(batch) if loss.shifted else batch["labels"]
        if students.shape[:-1] != labels.shape or students.shape[-1] == 1 or labels.is_floating_point():
            raise ValueError("distillation: there is not one class for each label. To fix: distill a classifier")
        return softened_divergence(students, teachers, counted=labels != IGNORED, temperature=said.temperature)

    return replace(loss, compute=compute)


def _whole(tensor: Tensor) -> Tensor:
    """Returns the whole tensor, where tensor parallelism has divided it over the ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def softened_divergence(students: Tensor, teachers: Tensor, *, counted: Tensor, temperature: float) -> Tensor:
    """Returns T^2 times the sum of KL(softmax(v / T) || softmax(z / T)) over the counted rows of [..., classes]."""
    z = functional.log_softmax(students.float() / temperature, dim=-1)
    v = functional.log_softmax(teachers.float() / temperature, dim=-1)
    each = functional.kl_div(z, v, reduction="none", log_target=True).sum(-1)
    return temperature**2 * (each * counted).sum()
