"""Checks the names of the components of a job's model."""

from __future__ import annotations

from torch import nn

from ringmaster.techniques.job import Adapter
from ringmaster.techniques.models.layers import check_components
from ringmaster.techniques.processes.order import TRAIN
from ringmaster.techniques.training.parts import TrainerPart, TrainingState


class ComponentsPart(TrainerPart):
    """Refuses components that the model lacks."""

    def __init__(self, state: TrainingState) -> None:
        super().__init__(state)
        self._job = state.job

    @classmethod
    def is_for(cls, state: TrainingState) -> bool:
        """Returns whether the job has components. A trial may stand for other jobs, with other components."""
        return bool(state.job.components) and state.order.purpose == TRAIN

    def change_base(self, model: nn.Module, adapter: Adapter | None) -> None:
        """Raises ValueError where no parameter of the model is within a component."""
        check_components(self._job, model)


PARTS = (ComponentsPart,)
