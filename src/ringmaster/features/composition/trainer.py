"""Checks the names of the components of a job's model."""

from __future__ import annotations

from torch import nn

from ringmaster.features.composition.job import components_of
from ringmaster.techniques import Job
from ringmaster.techniques.job_specs import Adapter
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


def check_components(job: Job, model: nn.Module) -> None:
    """Raises ValueError if a prefix in the job's `components` matches no module or parameter of its model.

    Jobs with an adapter are not checked: an adapter's files hold other parameters than the model.
    """
    if job.adapter is not None or not (components := components_of(job)):
        return
    names = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    for component, prefix in components.items():
        if not any(name == prefix or name.startswith(f"{prefix}.") for name in names):
            there = ", ".join(sorted({name.partition(".")[0] for name in names})[:8])
            raise ValueError(
                f"components: {component} is {prefix!r}, and no parameter of the model is within it. "
                f"To fix: begin with one of {there}"
            )


TRAINER_CALLBACKS = (ComponentsCallback,)
