"""The training of a model that is derived from others: a teacher's loss, and masks of pruned weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from ringmaster.codec import to_json
from ringmaster.features.adaptation.pruning import is_two_of_four, prune
from ringmaster.features.adaptation.rewriting import COMPARING_TIMEOUT_S, compare
from ringmaster.features.adaptation.structured_pruning import tensor_sources
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job import DISTILLED, PRUNED, STRUCTURED, AdaptationSpec, Job
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.models.build import build_model, check_weights, skeleton
from ringmaster.techniques.models.model_folders import model_of_folder, teacher_model
from ringmaster.techniques.probing import explained
from ringmaster.techniques.processes.order import TRAIN, TRIAL
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.training import bound_loss
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback, TrainerContext
from ringmaster.techniques.training.gradients import local, local_part, whole

LocalMasks = Sequence[tuple[nn.Parameter, Tensor]]
"""The pruned parameters of this rank, each with this rank's part of its mask."""


class AdaptationCallback(TrainerCallback):
    """The adaptation of a job that is distilled, pruned or composed; the finished model is compared with its parents.

    Raises ValueError where the model, or its teacher, does not match.
    """

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        assert context.job.adaptation is not None
        self._spec: AdaptationSpec = context.job.adaptation
        self._whole_masks: dict[str, Tensor] = {}
        self._masks: LocalMasks = ()
        self._num_kept: dict[str, int] = {}

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job has an adaptation, and is trained."""
        is_trained = context.technique is not None and context.order.purpose in (TRAIN, TRIAL)
        return is_trained and context.job.adaptation is not None

    @classmethod
    def check_weights(cls, job: Job, data: PreparedData, folders: Mapping[str, str]) -> None:
        """Refuses a teacher without its model's tensors, and a base of which the job's smaller model is no part."""
        how, folder = job.adaptation, folders.get(job.name)
        if how is not None and how.teacher_model is not None and (teacher := folders.get(how.teacher or "")):
            with explained("model: its weights cannot be read", "save the model again"):
                check_weights(how.teacher_model, data=data, weights_from=Path(teacher))
        is_narrowed = how is not None and how.method == STRUCTURED
        if is_narrowed and folder is not None and (larger := model_of_folder(Path(folder))):
            with explained("adaptation: it does not suit the base", "correct model.config"):
                tensor_sources(skeleton(larger, data), skeleton(job.model, data))

    def change_model(
        self, trainer: TrainerContext, model: nn.Module, loss: bound_loss.BoundLoss
    ) -> bound_loss.BoundLoss:
        """Prunes the model, or returns the loss of a student; evaluation uses the model's own."""
        if self._spec.kind == PRUNED:
            self._whole_masks = prune(model, self._spec)
        if self._spec.kind != DISTILLED:
            return loss
        order, job = trainer.order, trainer.job
        location = order.parents.get(self._spec.teacher or "")
        assert location or order.purpose == TRIAL, f"the folder of teacher {self._spec.teacher} was not ordered"
        folder = Path(location) if location else None  # before a teacher is trained, a fresh one is as fast
        spec = teacher_model(job, folder)
        teacher = build_model(spec, data=trainer.prepared, seed=job.seed, weights_from=folder).to(trainer.ranks.device)
        teachers_loss = bound_loss.bind_loss(None, teacher, spec)
        frozen = Teacher(model=teacher.eval().requires_grad_(False), loss=teachers_loss, autocast=trainer.autocast)
        return distilled_loss(loss, frozen, self._spec)

    def after_layout(self, model: nn.Module) -> None:
        """Computes this rank's part of each mask, for the parameters of the laid-out model."""
        self._masks = local_masks(model, self._whole_masks)
        self._num_kept = {name: int(mask.count_nonzero()) for name, mask in self._whole_masks.items()}
        self._whole_masks = {}

    def change_gradients(self) -> None:
        """Zeroes the gradients of pruned weights."""
        mask_gradients(self._masks)

    def after_export(self, context: JobContext, reporter: Reporter) -> Mapping[str, Any]:
        """Compares the finished model with its parents. Rank 0 measures them; the other ranks wait."""
        order = context.order
        if context.ranks.rank > 0:
            num_models = 1 + len(order.parents)
            reporter.phase("waiting for the comparison", timeout_s=num_models * COMPARING_TIMEOUT_S)
            return {}
        folder = Path(order.model_dir or "")
        self._verify(folder)
        return {"compared": tuple(map(to_json, compare(order, context.ranks, reporter, folder=folder)))}

    def _verify(self, folder: Path) -> None:
        """Raises RuntimeError where pruned weights of an exported model are no longer zero."""
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in self._num_kept.keys() & set(file.keys()):
                    weight = file.get_tensor(name)
                    is_right = is_two_of_four(weight) if self._spec.method == "2:4" else True
                    if int(weight.count_nonzero()) > self._num_kept[name] or not is_right:
                        raise RuntimeError(f"{name} in {folder} has weights again that were pruned")


TRAINER_CALLBACKS = (AdaptationCallback,)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A frozen model, and the loss that selects its inputs from a batch.

    autocast: returns the context of the student's precision, in which the teacher computes too.
    """

    model: nn.Module
    loss: bound_loss.BoundLoss
    autocast: Callable[[], AbstractContextManager[Any]]

    @torch.no_grad()
    def logits(self, batch: bound_loss.SampleTensors) -> Tensor | None:
        """Returns the teacher's logits for a batch."""
        with self.autocast():
            return bound_loss.logits_of(self.model(**self.loss.forward_inputs(batch)))


def distilled_loss(loss: bound_loss.BoundLoss, teacher: Teacher, adaptation: AdaptationSpec) -> bound_loss.BoundLoss:
    """Returns the distillation loss of a student whose loss without a teacher is `loss`.

    Raises ValueError where `loss` is not a cross entropy, as then the two losses would not cover the same rows.

    With student logits z, teacher logits v, temperature T and weight w, over the rows or tokens that have a label:

        loss = (1 - w) CE(z, label) + w T^2 KL(softmax(v / T) || softmax(z / T))

    Source: Hinton et al., Distilling the Knowledge in a Neural Network (arXiv:1503.02531), section 2: T^2 keeps the
    gradients of both parts comparable.
    """
    if loss.compute not in (bound_loss.next_token_loss, bound_loss.classification_loss):
        raise ValueError(
            "distillation: the model's loss is not a cross entropy of ours. "
            "To fix: distill a causal language model or a classifier of transformers"
        )

    def compute(output: Any, batch: bound_loss.SampleTensors) -> bound_loss.SumAndCount:
        total, count = loss(output, batch)
        return (1 - adaptation.weight) * whole(total) + adaptation.weight * divergence(output, batch), count

    def divergence(output: Any, batch: bound_loss.SampleTensors) -> Tensor:
        students, teachers = bound_loss.logits_of(output), teacher.logits(batch)
        if students is None or teachers is None:
            raise ValueError("distillation: a model gives no logits. To fix: distill between models that do")
        students, teachers = whole(students), whole(teachers)
        if students.shape != teachers.shape:
            raise ValueError(
                f"distillation: the student's logits are {list(students.shape)} and the teacher's "
                f"{list(teachers.shape)}. To fix: give both the same vocabulary or labels"
            )
        labels = bound_loss.next_tokens(batch) if loss.shifted else batch["labels"]
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


def local_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> LocalMasks:
    """Returns each mask's part that corresponds to this rank's part of the parameter, once the model is laid out."""
    return [
        (p, local_part(masks[name], p).to(local(p).device)) for name, p in model.named_parameters() if name in masks
    ]


@torch.no_grad()
def mask_gradients(masks: LocalMasks) -> None:
    """Zeroes the gradients of pruned weights, so that the optimizer's moments, and the weights, stay zero there."""
    for parameter, mask in masks:
        if parameter.grad is not None:
            local(parameter.grad).mul_(mask)
