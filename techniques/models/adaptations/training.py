"""Additions to training: a teacher's loss besides the labels, masks of pruned weights, and a loss's reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import DISTILLED, PRUNED, AdaptationSpec, Job, ModelSpec
from ringmaster.techniques.models import build_model
from ringmaster.techniques.models.adaptations.distilling import Teacher, distilled_loss
from ringmaster.techniques.models.adaptations.folders import model_of_folder
from ringmaster.techniques.models.adaptations.pruning import (
    LocalMasks,
    is_two_of_four,
    local_masks,
    mask_gradients,
    prune,
)
from ringmaster.techniques.models.adaptations.quantizing import is_quantized
from ringmaster.techniques.runtime.processes.order import TRAIN, TRIAL, GangOrder
from ringmaster.techniques.training.losses import Loss, loss_of
from ringmaster.techniques.training.reference import Reference, frozen_copy


class Adapting:
    """The adaptation of one job during training; it does nothing for a job without one, or outside training.

    Raises ValueError where the model, or its teacher, does not match, or where the model is quantized and so cannot be
    trained.

    loss: the loss to train with; evaluation uses the model's own.
    reference: the initial weights, for a loss that compares with them; None for other losses, and where they are not
        known.
    autocast: returns the context of the job's precision.
    """

    def __init__(
        self,
        order: GangOrder,
        *,
        model: nn.Module,
        loss: Loss,
        prepared: PreparedData,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.loss = loss
        self.reference = _reference(order, model=model, loss=loss, prepared=prepared, device=device, autocast=autocast)
        self._whole_masks: dict[str, torch.Tensor] = {}
        self._masks: LocalMasks = ()
        self._num_kept: dict[str, int] = {}
        self._is_structured = order.job.adaptation is not None and order.job.adaptation.method == "2:4"
        if order.purpose not in (TRAIN, TRIAL):
            return
        if is_quantized(model):
            raise ValueError(
                "the model is quantized, and a quantized model is not trained further. "
                "To fix: train what it was quantized from, and quantize the result"
            )
        said = order.job.adaptation
        if said is not None and said.kind == PRUNED:
            self._whole_masks = prune(model, said)
        if said is not None and said.kind == DISTILLED:
            taught = _teacher(order, said, prepared=prepared).to(device).eval().requires_grad_(False)
            teachers_loss = loss_of(None, taught, teacher_model(order.job, _folder(order, said)))
            self.loss = distilled_loss(loss, Teacher(model=taught, loss=teachers_loss, autocast=autocast), said)

    def lay_out(self, model: nn.Module) -> None:
        """Computes this rank's part of each mask, for the parameters of the laid-out model."""
        self._masks = local_masks(model, self._whole_masks)
        self._num_kept = {name: int(mask.count_nonzero()) for name, mask in self._whole_masks.items()}
        self._whole_masks = {}

    def verify(self, folder: Path) -> None:
        """Raises RuntimeError where pruned weights of an exported model are no longer zero."""
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in self._num_kept.keys() & set(file.keys()):
                    weight = file.get_tensor(name)
                    is_right = is_two_of_four(weight) if self._is_structured else True
                    if int(weight.count_nonzero()) > self._num_kept[name] or not is_right:
                        raise RuntimeError(f"{name} in {folder} has weights again that were pruned")

    def mask_gradients(self) -> None:
        """Zeroes the gradients of pruned weights; called after the exchange and before clipping."""
        mask_gradients(self._masks)


def teacher_model(job: Job, folder: Path | None) -> ModelSpec:
    """Returns the model of a job's teacher. Raises ValueError where neither the job nor the folder describes it."""
    assert job.adaptation is not None
    said = job.adaptation.teacher_model or (model_of_folder(folder) if folder is not None else None)
    if said is None:
        raise ValueError(
            f"distillation: the teacher {job.adaptation.teacher} does not say what model it is. "
            f"To fix: give adaptation.teacher_model"
        )
    return said


def _reference(
    order: GangOrder,
    *,
    model: nn.Module,
    loss: Loss,
    prepared: PreparedData,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Reference | None:
    """Returns the job's initial weights, where its loss compares with them.

    `model` has them in training, before a checkpoint is restored. In an evaluation of trained weights they are built
    anew, unless they were another model's.
    """
    if loss.function is None or not loss.function.compares:
        return None
    job, in_half, copied = order.job, order.job.precision == "bf16-params", None
    if order.purpose in (TRAIN, TRIAL):
        if job.adapter is None or not job.adapter.begins_as_base:
            copied = frozen_copy(model, device=device, in_half=in_half)
    elif job.adapter is None or job.adapter.modules_to_save:
        if job.base is not None:
            return None
        copied = frozen_copy(build_model(job.model, data=prepared, seed=job.seed), device=device, in_half=in_half)
    return Reference(model=copied, loss=loss, autocast=autocast)


def _folder(order: GangOrder, said: AdaptationSpec) -> Path | None:
    found = order.parents.get(said.teacher or "")
    return Path(found) if found else None


def _teacher(order: GangOrder, said: AdaptationSpec, *, prepared: PreparedData) -> nn.Module:
    """Returns the teacher; in a trial before it is trained, one with fresh weights, which is as fast."""
    folder = _folder(order, said)
    assert folder is not None or order.purpose == TRIAL, f"the folder of teacher {said.teacher} was not ordered"
    model = teacher_model(order.job, folder)
    return build_model(model, data=prepared, seed=order.job.seed, weights_from=folder)
