"""Centralizes the gradients of matrices before each optimizer step."""

from torch import nn

from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback, TrainerContext
from ringmaster_centralization.job import Centralization


class CentralizationCallback(TrainerCallback):
    """Subtracts from the gradient of each output of a matrix its mean over the inputs."""

    parameters: list[nn.Parameter]

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job requests it."""
        return context.job.feature(Centralization) is not None

    def before_training(self, trainer: TrainerContext) -> None:
        """Keeps the parameters."""
        self.parameters = trainer.parameters

    def change_gradients(self) -> None:
        """Centralizes the gradients, which all devices have exchanged."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.ndim > 1:
                parameter.grad -= parameter.grad.mean(dim=tuple(range(1, parameter.ndim)), keepdim=True)


TRAINER_CALLBACKS = (CentralizationCallback,)
