"""The teacher of a job's loss, a frozen model beside the one that is trained, on each of its devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ringmaster.features.loss_teacher.job import LossTeacher
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.models import model_folders
from ringmaster.techniques.models.architectures import instantiate
from ringmaster.techniques.models.build import build_model, model_config
from ringmaster.techniques.processes.order import EVALUATE, TRIAL, GangOrder
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.training.bound_loss import BoundLoss
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback, TrainerContext
from ringmaster.techniques.training.gradients import compute_in_half
from ringmaster.techniques.training.reference_model import ReferenceModel


class LossTeacherCallback(TrainerCallback):
    """Gives the loss of a job the outputs of its teacher, in training and in its evaluations."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        feature = context.job.feature(LossTeacher)
        assert feature is not None, "as is_for says"
        self._feature = feature

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job is trained alone with a teacher."""
        return context.technique is not None and context.job.feature(LossTeacher) is not None

    def change_model(self, trainer: TrainerContext, model: nn.Module, loss: BoundLoss) -> BoundLoss:
        """Builds the teacher. Raises ValueError where it is not known, or reads other tokens than the model."""
        folder, purpose = _folder(self._feature, trainer.order), trainer.order.purpose
        if folder is None and purpose == EVALUATE:
            return loss  # of which nothing is known then
        if folder is None and purpose != TRIAL:
            raise ValueError(
                f"loss.teacher: the model of job {self._feature.job} is not there. To fix: run the batch that trains "
                "it, or name another teacher"
            )
        # Before it is trained, a fresh one is as fast, and needs as much memory.
        spec = self._feature.model
        if spec is None:
            raise ValueError(f"loss.teacher: the model of job {self._feature.job} is not known. To fix: give its model")
        of_job = None if self._feature.job is None or folder is None else Path(folder)
        teacher = build_teacher(spec, data=trainer.prepared, seed=trainer.job.seed, weights_from=of_job)
        teacher = teacher.eval().requires_grad_(False).to(trainer.ranks.device)
        if trainer.job.precision == "bf16-params":
            compute_in_half(teacher)
        trainer.reference = ReferenceModel(model=teacher, loss=loss, autocast=trainer.autocast)
        return loss

    def after_export(self, context: JobContext, reporter: Reporter) -> Mapping[str, Any]:
        """Writes the teacher beside the loss of the exported model, so that evaluations find it."""
        file = Path(context.order.model_dir or "") / model_folders.LOSS
        if context.ranks.rank == 0 and file.is_file():
            content = {**model_folders.read_json(file), model_folders.REFERENCE: _folder(self._feature, context.order)}
            file.write_text(json.dumps(content))
        return {}


def _folder(feature: LossTeacher, order: GangOrder) -> str | None:
    """Returns the folder of the teacher, or its name on the hub; None where it is not known."""
    return feature.teacher if feature.job is None else order.parents.get(feature.job)


def build_teacher(spec: ModelSpec, *, data: PreparedData, seed: int, weights_from: Path | None) -> nn.Module:
    """Returns the model of a teacher, with the weights of a folder if there is one."""
    return build_model(spec, data=data, seed=seed, weights_from=weights_from)


def _without_weights(spec: ModelSpec, *, data: PreparedData, seed: int, **_: Any) -> nn.Module:
    if spec.factory is not None:
        return build_model(spec, data=data, seed=seed)
    return instantiate(model_config(spec, data))


WITHOUT_VALUES: Mapping[str, Callable[..., Any]] = {"build_teacher": _without_weights}
TRAINER_CALLBACKS = (LossTeacherCallback,)
