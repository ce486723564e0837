"""Checks the names of the components of a job's model."""

from __future__ import annotations

from torch import nn

from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.models.layers import check_components
from ringmaster.techniques.processes.order import TRAIN, GangOrder
from ringmaster.techniques.training.callbacks import TrainerCallback


class ComponentsCallback(TrainerCallback):
    """Refuses components that the model lacks."""

    @classmethod
    def change_base(cls, order: GangOrder, model: nn.Module, adapter: Adapter | None) -> None:
        """Raises ValueError where no parameter of the model is within a component.

        A trial may stand for other jobs, with other components.
        """
        if order.purpose == TRAIN:
            check_components(order.job, model)


TRAINER_CALLBACKS = (ComponentsCallback,)
