"""How the gradients of a step change the weights of a job, by its `UpdateRule`.

A job has exactly one. The module `trainer` of a feature lists its rules in `UPDATE_RULES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ringmaster import features

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.checkpoints.checkpoint import Checkpoint
    from ringmaster.techniques.checkpoints.state import Reader
    from ringmaster.techniques.job import Job
    from ringmaster.techniques.training.callbacks import LossSums, StepPart, TrainerContext


class UpdateRule:
    """How gradients change the weights: by default, by an optimizer step with their sum over all ranks.

    parts: the parts of each step that this rank computes.
    """

    def __init__(self, trainer: TrainerContext) -> None:
        self.parts: Sequence[StepPart] = (trainer.own_part,)

    @classmethod
    def is_for(cls, job: Job) -> bool:
        """Returns whether a job has the rule."""
        return True

    @classmethod
    def refuse(cls, trainer: TrainerContext, reader: Reader, checkpoint: Checkpoint) -> None:
        """Raises ValueError where a checkpoint, or the rest of the job, needs this rule and the job has another."""

    def compute(self, trainer: TrainerContext) -> LossSums:
        """Computes the gradients of the rank's parts of the next step; returns their sums."""
        return trainer.compute_gradients(trainer.own_part)

    def is_common(self, step: int) -> bool:
        """Returns whether all ranks take the optimizer step together, with the gradients that they have exchanged."""
        return True

    def after_update(self, step: int) -> None:
        """Follows the update of the last of `step` steps."""

    def before_evaluation(self) -> None:
        """Gives the model the weights that are evaluated."""

    def written(self, trainer: TrainerContext) -> dict[str, Tensor] | None:
        """Returns the tensors that this rank writes into a checkpoint; None for those of model and optimizer."""
        return None

    def restore(self, trainer: TrainerContext, reader: Reader, checkpoint: Checkpoint) -> None:
        """Loads the rule's state. The model and the optimizer are restored before."""
        for rule in features.listed("trainer", "UPDATE_RULES"):
            rule.refuse(trainer, reader, checkpoint)

    def unmarked_chunk(self, trainer: TrainerContext) -> int:
        """Returns the chunk of an exact job whose checkpoint names none: earlier releases did not divide the batch."""
        return trainer.job.global_batch_size

    def unmeasured_s(self, trainer: TrainerContext) -> float:
        """Returns the seconds of a step, on average, that a trial's steps do not contain. The state is lost."""
        return 0.0


def rule_of(trainer: TrainerContext) -> UpdateRule:
    """Returns the update rule of a job."""
    rules: Iterator[type[UpdateRule]] = features.listed("trainer", "UPDATE_RULES")
    return next((rule for rule in rules if rule.is_for(trainer.job)), UpdateRule)(trainer)
