"""The optimizer and the learning-rate schedule of a job; neither depends on how it is parallelised."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.engine.gradients import scale_
from ringmaster.techniques.job import Job, ScheduleSpec

CLASSES: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
# The quickest kernels that sharded tensors have too: fused SGD has no sharding strategy (torch 2.13).
KERNELS: dict[str, dict[str, Any]] = {"adamw": {"fused": True}, "sgd": {"foreach": True}}


def build_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The job's optimizer over `parameters`, with its quickest kernels. Raises ValueError on an option it has not."""
    cls = CLASSES[job.optimizer.name]
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in job.optimizer.options.items()}
    group = {"params": [p for p in parameters if p.requires_grad]}  # as a group, it may be empty: a share may be
    try:
        return cls([group], lr=job.optimizer.lr, **KERNELS[job.optimizer.name], **options)  # type: ignore[call-arg]
    except TypeError as error:
        raise ValueError(f"optimizer {job.optimizer.name}: {error}") from error


def update_(
    job: Job,
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    *,
    step: int,
    to_mean: float,
    norm: Tensor | None,
) -> None:
    """Turns gradients of a sum into those of its mean, clips them, and takes the optimizer's step number `step`.

    With g the gradient as it is, m = `to_mean`, |g| its `norm` (needed where the job clips) and c the clipping norm,
    the optimizer sees g * m * min(1, c / |g * m|).
    """
    factor: float | Tensor = to_mean
    if (limit := job.clip_grad_norm) is not None:
        assert norm is not None
        factor = to_mean * torch.clamp(limit / (norm * to_mean + 1e-6), max=1.0)
    scale_(parameters, factor)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(job, step)
    optimizer.step()


def learning_rate(job: Job, step: int) -> float:
    """The learning rate of step `step` (0-based): a function of the step alone, so that nothing needs restoring."""
    return job.optimizer.lr * schedule_factor(job.schedule, step, num_steps=job.total_steps)


def schedule_factor(schedule: ScheduleSpec, step: int, *, num_steps: int) -> float:
    """The share of the base learning rate at `step`: linear warm-up, then constant, linear or half a cosine to zero."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / max(num_steps - schedule.warmup_steps, 1)
    if schedule.name == "linear":
        return 1.0 - progress
    if schedule.name == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
