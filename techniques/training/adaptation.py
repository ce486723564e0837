"""Additions to the training of a job: a teacher's loss, masks of pruned weights, and a copy of the initial weights."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job import DISTILLED, PRUNED, AdaptationSpec, Job, ModelSpec
from ringmaster.techniques.losses.preferences import log_probabilities
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.models.adapter_modules import switchable
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.model_folders import model_of_folder
from ringmaster.techniques.models.quantization import is_quantized
from ringmaster.techniques.processes.order import TRAIN, TRIAL, GangOrder
from ringmaster.techniques.training import losses
from ringmaster.techniques.training.gradients import compute_in_half, local, share_of, whole

Forward = Callable[[dict[str, Tensor]], Any]


class ReferenceModel:
    """Adds to batches their log-probabilities under the initial weights.

    model: a frozen copy of the model with them; None where the trained model computes them without its adapter.

    With an adapter, the initial weights are those of the model itself without its adapter, and one more forward of the
    same model gives their log-probabilities. Otherwise a frozen copy computes them.
    """

    def __init__(
        self, *, model: nn.Module | None, loss: losses.Loss, autocast: Callable[[], AbstractContextManager[Any]]
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

    def _completed(self, batch: losses.Batch, output: Any) -> dict[str, Tensor]:
        logits, labels = self._loss.predictions(output, batch)
        if logits is None or labels is None:
            raise ValueError("loss: the model gives no logits, or the samples no labels. To fix: give both")
        assert self._loss.function is not None, "a loss that compares is one that the job names"
        compared = self._loss.function.compared(logits, labels)
        return {**batch, losses.REFERENCE: log_probabilities(logits, labels) if compared is None else compared}


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


class JobAdaptation:
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
        loss: losses.Loss,
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
        adaptation = order.job.adaptation
        if adaptation is not None and adaptation.kind == PRUNED:
            self._whole_masks = prune(model, adaptation)
        if adaptation is not None and adaptation.kind == DISTILLED:
            location = order.parents.get(adaptation.teacher or "")
            assert location or order.purpose == TRIAL, f"the folder of teacher {adaptation.teacher} was not ordered"
            folder = Path(location) if location else None  # before a teacher is trained, a fresh one is as fast
            spec = teacher_model(order.job, folder)
            teacher = build_model(spec, data=prepared, seed=order.job.seed, weights_from=folder).to(device)
            teachers_loss = losses.loss_of(None, teacher, spec)
            frozen = Teacher(model=teacher.eval().requires_grad_(False), loss=teachers_loss, autocast=autocast)
            self.loss = distilled_loss(loss, frozen, adaptation)

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
    model = job.adaptation.teacher_model or (model_of_folder(folder) if folder is not None else None)
    if model is None:
        raise ValueError(
            f"distillation: the teacher {job.adaptation.teacher} does not say what model it is. "
            f"To fix: give adaptation.teacher_model"
        )
    return model


def _reference(
    order: GangOrder,
    *,
    model: nn.Module,
    loss: losses.Loss,
    prepared: PreparedData,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> ReferenceModel | None:
    """Returns the job's initial weights, where its loss compares with them.

    `model` has them in training, before a checkpoint is restored. In an evaluation of trained weights they are built
    again, unless they were another model's.
    """
    if loss.function is None or not loss.function.compares:
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


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A frozen model, and the loss that selects its inputs from a batch.

    autocast: returns the context of the student's precision, in which the teacher computes too.
    """

    model: nn.Module
    loss: losses.Loss
    autocast: Callable[[], AbstractContextManager[Any]]

    @torch.no_grad()
    def logits(self, batch: losses.Batch) -> Tensor | None:
        """Returns the teacher's logits for a batch."""
        with self.autocast():
            return losses.logits_of(self.model(**self.loss.forward_inputs(batch)))


def distilled_loss(loss: losses.Loss, teacher: Teacher, adaptation: AdaptationSpec) -> losses.Loss:
    """Returns the distillation loss of a student whose loss without a teacher is `loss`.

    Raises ValueError where `loss` is no cross entropy, as then the two losses would not cover the same rows.

    With student logits z, teacher logits v, temperature T and weight w, over the rows or tokens that have a label:

        loss = (1 - w) CE(z, label) + w T^2 KL(softmax(v / T) || softmax(z / T))

    Source: Hinton et al., Distilling the Knowledge in a Neural Network (arXiv:1503.02531), section 2: T^2 keeps the
    gradients of both parts comparable.
    """
    if loss.compute not in (losses.next_token_loss, losses.classification_loss):
        raise ValueError(
            "distillation: the model's loss is no cross entropy of ours. "
            "To fix: distill a causal language model or a classifier of transformers"
        )

    def compute(output: Any, batch: losses.Batch) -> losses.SumAndCount:
        total, count = loss(output, batch)
        return (1 - adaptation.weight) * whole(total) + adaptation.weight * divergence(output, batch), count

    def divergence(output: Any, batch: losses.Batch) -> Tensor:
        students, teachers = losses.logits_of(output), teacher.logits(batch)
        if students is None or teachers is None:
            raise ValueError("distillation: a model gives no logits. To fix: distill between models that do")
        students, teachers = whole(students), whole(teachers)
        if students.shape != teachers.shape:
            raise ValueError(
                f"distillation: the student's logits are {list(students.shape)} and the teacher's "
                f"{list(teachers.shape)}. To fix: give both the same vocabulary or labels"
            )
        labels = losses.next_tokens(batch) if loss.shifted else batch["labels"]
        if students.shape[:-1] != labels.shape or students.shape[-1] == 1 or labels.is_floating_point():
            raise ValueError("distillation: there is not one class for each label. To fix: distill a classifier")
        return softened_divergence(students, teachers, counted=labels != IGNORED, temperature=adaptation.temperature)

    return replace(loss, compute=compute)


def softened_divergence(students: Tensor, teachers: Tensor, *, counted: Tensor, temperature: float) -> Tensor:
    """Returns T^2 times the sum of KL(softmax(v / T) || softmax(z / T)) over the counted rows of [..., classes]."""
    z = functional.log_softmax(students.float() / temperature, dim=-1)
    v = functional.log_softmax(teachers.float() / temperature, dim=-1)
    each = functional.kl_div(z, v, reduction="none", log_target=True).sum(-1)
    return temperature**2 * (each * counted).sum()


GROUP, KEPT = 4, 2  # of each 4 neighbouring weights of a row, 2 are kept

LocalMasks = Sequence[tuple[nn.Parameter, Tensor]]
"""The pruned parameters of this rank, each with this rank's part of its mask."""


@torch.no_grad()
def prune(model: nn.Module, adaptation: AdaptationSpec) -> dict[str, Tensor]:
    """Zeroes weights of `model` in place; returns the masks of kept entries (bool, of the weight's shape) by name.

    The method "magnitude" zeroes the `sparsity` share of each weight that is smallest (Han et al., arXiv:1506.02626).
    The method "2:4" keeps the two largest of each four neighbours along a row of a linear layer; sparse tensor cores
    skip the zeros (Mishra et al., arXiv:2104.08378). Of equal weights the first ones are zeroed. Raises ValueError
    where the model has no suitable layer.

    The smallest weights of linear and convolution layers become zero. The output head of a language model is left
    whole, as by convention (Frantar and Alistarh, SparseGPT, arXiv:2301.00774).
    """
    masks, is_structured = {}, adaptation.method == "2:4"
    for name, weight in _prunable(model, is_structured=is_structured):
        kept = two_of_four(weight) if is_structured else largest(weight, sparsity=adaptation.sparsity)
        weight.mul_(kept)
        masks[name] = kept
    if not masks:
        layers = f"linear layer of a width that {GROUP} divides" if is_structured else "linear or convolution"
        raise ValueError(
            f"pruning by {adaptation.method}: the model has no {layers}. To fix: prune by magnitude, or another"
        )
    return masks


def largest(weight: Tensor, *, sparsity: float) -> Tensor:
    """Returns the mask that keeps all but the round(sparsity n) entries of smallest magnitude."""
    order = weight.abs().flatten().argsort(stable=True)
    kept = torch.ones_like(order, dtype=torch.bool)
    kept[order[: round(sparsity * len(order))]] = False
    return kept.view(weight.shape)


def two_of_four(weight: Tensor) -> Tensor:
    """Returns the mask over [out, in] that keeps, of each four neighbours along a row, the two of largest magnitude."""
    groups = weight.abs().reshape(-1, GROUP)
    order = groups.argsort(dim=1, stable=True)
    kept = torch.ones_like(groups, dtype=torch.bool).scatter_(1, order[:, : GROUP - KEPT], False)
    return kept.view(weight.shape)


def is_two_of_four(weight: Tensor) -> bool:
    """Returns whether each four neighbours along a row have at most two nonzero entries."""
    return bool(((weight.reshape(-1, GROUP) != 0).sum(1) <= KEPT).all())


def local_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> LocalMasks:
    """Returns each mask's part that corresponds to this rank's part of the parameter, once the model is laid out."""
    return [(p, share_of(masks[name], p).to(local(p).device)) for name, p in model.named_parameters() if name in masks]


@torch.no_grad()
def mask_gradients(masks: LocalMasks) -> None:
    """Zeroes the gradients of pruned weights, so that the optimizer's moments, and the weights, stay zero there."""
    for parameter, mask in masks:
        if parameter.grad is not None:
            local(parameter.grad).mul_(mask)


def _prunable(model: nn.Module, *, is_structured: bool) -> Iterator[tuple[str, Tensor]]:
    ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    ends |= {id(head.weight)} if head is not None else set()
    kinds = (nn.Linear,) if is_structured else (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for name, module in model.named_modules():
        if not isinstance(module, kinds) or id(module.weight) in ends:
            continue
        if not is_structured or module.weight.shape[1] % GROUP == 0:
            yield f"{name}.weight" if name else "weight", module.weight
