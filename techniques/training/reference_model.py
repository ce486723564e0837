"""The weights that a job began with, or a teacher, for losses that compare the trained model with them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.losses.supervised import log_probabilities
from ringmaster.techniques.models.adapter_modules import switchable
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.processes.order import TRAIN, TRIAL, GangOrder
from ringmaster.techniques.training import bound_loss
from ringmaster.techniques.training.gradients import compute_in_half

Forward = Callable[[dict[str, Tensor]], Any]


class ReferenceModel:
    """Adds to batches their log-probabilities under the initial weights, or what a teacher gives for them.

    model: a frozen copy of the model with them, or the teacher; None where the trained model computes them without its
        adapter.

    With an adapter, the initial weights are those of the model itself without its adapter, and one more forward of the
    same model gives their log-probabilities. Otherwise a frozen copy computes them.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None,
        loss: bound_loss.BoundLoss,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model, self._loss, self._autocast = model, loss, autocast

    @torch.no_grad()
    def before_forward(
        self, batch: dict[str, Tensor], *, trained: nn.Module, inner: nn.Module, forward: Forward
    ) -> dict[str, Tensor]:
        """Completes a batch by the trained model, before its own forward. All ranks that share it call this together.

        trained: the model as its technique has laid it out.
        inner: what the technique unwraps of it. Some techniques hide it, and some compute with copies of its modules.
        forward: runs the model as in an evaluation; it returns None on ranks that have no output.
        """
        if self.model is not None:
            return batch
        was_training = trained.training
        trained.eval()
        with without_adapter(trained, inner):
            output = forward(batch)
        trained.train(was_training)
        return batch if output is None else self._completed(batch, output)

    @torch.no_grad()
    def before_loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Completes a batch by the frozen copy, where its loss is computed."""
        if self.model is None:
            return batch
        with self._autocast():
            output = self.model(**self._loss.forward_inputs(batch))
        return self._completed(batch, output)

    def _completed(self, batch: bound_loss.SampleTensors, output: Any) -> dict[str, Tensor]:
        logits, labels = self._loss.predictions(output, batch)
        if logits is None or labels is None:
            raise ValueError("loss: the model gives no logits, or the samples no labels. To fix: give both")
        assert self._loss.function is not None, "a loss that compares is one that the job names"
        compared = self._loss.function.compared(logits, labels)
        return {**batch, bound_loss.REFERENCE: log_probabilities(logits, labels) if compared is None else compared}


def frozen_copy(model: nn.Module, *, device: torch.device, in_half: bool) -> nn.Module:
    """Returns a frozen copy of a model before its first step. in_half: as the precision "bf16-params" computes."""
    copied = copy.deepcopy(model).eval().requires_grad_(False).to(device)
    if in_half:
        compute_in_half(copied)
    return copied


@contextmanager
def without_adapter(*models: nn.Module) -> Iterator[None]:
    """Switches the adapters of `models` off within the context."""
    parts = [part for model in models for part in switchable(model)]
    for part in parts:
        part.is_off = True
    try:
        yield
    finally:
        for part in parts:
            part.is_off = False


def reference_of(
    order: GangOrder,
    *,
    model: nn.Module,
    loss: bound_loss.BoundLoss,
    prepared: PreparedData,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> ReferenceModel | None:
    """Returns the job's initial weights, where its loss compares with them.

    `model` has them in training, before a checkpoint is restored. In an evaluation of trained weights they are built
    again, unless they were another model's. A callback sets the teacher of losses that need one.
    """
    if loss.function is None or not loss.function.compares or loss.function.needs_teacher:
        return None
    job, in_half, copied = order.job, order.job.precision == "bf16-params", None
    if order.purpose in (TRAIN, TRIAL):
        if job.adapter is None or not job.adapter.begins_as_base:
            copied = frozen_copy(model, device=device, in_half=in_half)
    elif job.adapter is not None and job.adapter.continues_base:
        return None
    elif job.adapter is None or job.adapter.modules_to_save:
        if job.base is not None:
            return None
        copied = frozen_copy(build_model(job.model, data=prepared, seed=job.seed), device=device, in_half=in_half)
    return ReferenceModel(model=copied, loss=loss, autocast=autocast)
