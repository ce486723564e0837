"""Ends a job at its target, and measures the noise of gradients, from which a larger batch size is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.codec import to_json
from ringmaster.features.target.job import Target, variables_of
from ringmaster.features.target.noise_scale import DAMPING, MEASURED_EVERY, GradientNoise, probe_steps
from ringmaster.techniques.processes.order import TRAIN
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback, TrainerContext
from ringmaster.techniques.training.gradients import local, squared_norm


class TargetCallback(TrainerCallback):
    """Ends a job when an evaluation has reached its target."""

    may_end_job = True

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        target = context.job.feature(Target)
        assert target is not None
        self._target = target

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job has a target."""
        return context.job.feature(Target) is not None

    def ends_job(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the metrics have reached the target."""
        return self._target.is_reached(metrics)

    def final_values(self, metrics: Mapping[str, float]) -> Mapping[str, bool]:
        """Returns whether the target is reached."""
        return {"ended_early": self._target.is_reached(metrics)}


class NoiseCallback(TrainerCallback):
    """Measures the noise of the gradients of a job that may change its batch size."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        self._job = context.job
        self._norm: PreconditionedNorm | None = None
        self._first: Tensor | None = None  # the squared norm of the first micro-batches of all ranks
        self._num_samples, self._count = 0, 0.0  # of these; the count on this rank

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job may change its batch size, and is trained by a technique that can measure noise."""
        is_able = context.technique is not None and context.technique.measures_noise
        return is_able and context.order.purpose == TRAIN and len(variables_of(context.job).global_batch_size) > 1

    def before_training(self, trainer: TrainerContext) -> None:
        """Reads the moments of the trainer's optimizer from now on."""
        self._norm = PreconditionedNorm(trainer.parameters, trainer.optimizer, device=trainer.ranks.device)

    def splits_first(self, step: int) -> bool:
        """Returns whether the noise is measured in a step. Before the first one there are no second moments."""
        if self._norm is None or step == 0:
            return False
        return step < probe_steps(self._job.phase(0).num_steps) or step % MEASURED_EVERY == 0

    def observe_first(self, *, count: float, num_samples: int) -> None:
        """Measures the gradients of the first micro-batches."""
        assert self._norm is not None
        self._first, self._count, self._num_samples = self._norm.squared(), count, num_samples

    def summed_values(self) -> tuple[float, ...]:
        """Returns the count of the first micro-batch."""
        return (self._count,)

    def observe_gradients(self, sums: Sequence[float], *, step: int, count: float, to_mean: float) -> Any:
        """Returns what the gradients of the step, and of its first micro-batches, reveal of their noise."""
        (first_count,), first = sums, self._first
        self._first, self._count = None, 0.0
        if not first_count or first is None:
            return None
        assert self._norm is not None
        noise = GradientNoise.of(
            step,
            part=float(first) * (to_mean / (first_count / count)) ** 2,
            whole=float(self._norm.squared()) * to_mean**2,
            part_size=self._num_samples,
            size=self._job.phase(step).global_batch_size,
        )
        return to_json(noise)


TRAINER_CALLBACKS = (TargetCallback, NoiseCallback)


class PreconditionedNorm:
    """Measures the squared length of the gradients that parameters have, as their optimizer scales them."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, *, device: Any) -> None:
        self._parameters, self._optimizer, self._device = parameters, optimizer, device

    def squared(self) -> Tensor:
        """Returns |P g|^2, a scalar that is equal on every rank of the gradients' meshes.

        P is 1 for an optimizer without second moments, and before its first step. On sharded parameters the root mean
        square in P is that of the rank's part: any P that a step does not change serves.
        """
        beta2 = {
            id(p): group.get("betas", (0.0, 0.0))[1] for group in self._optimizer.param_groups for p in group["params"]
        }

        def scaled(parameter: nn.Parameter) -> Tensor:
            assert parameter.grad is not None
            gradient, state = local(parameter.grad), self._optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state or not gradient.numel():
                return gradient
            corrected = 1 - beta2[id(parameter)] ** float(state["step"])
            root = (local(state["exp_avg_sq"]) / corrected).sqrt_()
            scaled_gradient: Tensor = gradient / root.add_(DAMPING * root.square().mean().sqrt())
            return scaled_gradient

        return squared_norm(self._parameters, scaled=scaled, device=self._device)
