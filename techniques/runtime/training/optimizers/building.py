"""The optimizer and the learning-rate schedule of a job; both are independent of its parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.interface.job import Job
from ringmaster.techniques.runtime.training.gradients import scale_
from ringmaster.techniques.runtime.training.optimizers.schedules import learning_rate

CLASSES: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
# The quickest kernels that also support sharded tensors: fused SGD has no sharding strategy (torch 2.13).
KERNELS: dict[str, dict[str, Any]] = {"adamw": {"fused": True}, "sgd": {"foreach": True}}


def build_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the job's optimizer with its quickest kernels. Raises ValueError on an unknown option."""
    cls = CLASSES[job.optimizer.name]
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in job.optimizer.options.items()}
    group = {"params": [p for p in parameters if p.requires_grad]}  # unlike a list, a group may be empty
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

    With g the gradient of the sum, m = `to_mean`, |g| its `norm` (required where the job clips) and c the clipping
    norm, the optimizer sees g * m * min(1, c / |g * m|).
    """
    factor: float | Tensor = to_mean
    if (limit := job.clip_grad_norm) is not None:
        assert norm is not None
        factor = to_mean * torch.clamp(limit / (norm * to_mean + 1e-6), max=1.0)
    scale_(parameters, factor)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(job, step)
    optimizer.step()
