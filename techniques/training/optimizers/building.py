"""Builds the optimizer of a job, and takes its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringmaster.techniques.interface.job import OF_WHOLE_TENSORS, OPTIMIZER_OPTIONS, Job, OptimizerSpec
from ringmaster.techniques.training.gradients import scale_
from ringmaster.techniques.training.optimizers.combining import Together, WholeTensors
from ringmaster.techniques.training.optimizers.lion import Lion
from ringmaster.techniques.training.optimizers.schedules import schedule_factor
from ringmaster.techniques.training.optimizers.settings import ParameterSettings

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adafactor": torch.optim.Adafactor,
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "muon": torch.optim.Muon,
    "sgd": torch.optim.SGD,
}
# The quickest kernels that also support sharded tensors: fused SGD has no sharding strategy (torch 2.13).
KERNELS: dict[str, dict[str, Any]] = {"adamw": {"fused": True}, "sgd": {"foreach": True}}
OF_ADAMW = "adamw_"
"""The prefix of Muon's options for the parameters that AdamW updates."""
FIRST_RATE = "initial_lr"
"""A group's learning rate before the schedule, under the name that torch's schedulers use."""


def build_optimizer(
    job: Job,
    parameters: Iterable[nn.Parameter],
    *,
    settings: Mapping[nn.Parameter, ParameterSettings] | None = None,
) -> torch.optim.Optimizer:
    """Returns the job's optimizer with its quickest kernels, and a group for parameters of equal settings.

    settings: of each parameter; the job's learning rate, and no more, where there are none.
    Raises ValueError on an unknown option.
    """
    spec, of = job.optimizer, settings or {}
    groups: dict[ParameterSettings, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(of.get(parameter, ParameterSettings(lr=spec.lr)), []).append(parameter)
    if spec.name != "muon":
        return _build(spec.name, groups, spec=spec, options=_options(spec))
    matrices = {key: group for key, group in groups.items() if key.is_matrix}
    others = {key: group for key, group in groups.items() if not key.is_matrix}
    options = _options(spec)
    of_adamw = {key.removeprefix(OF_ADAMW): value for key, value in options.items() if key.startswith(OF_ADAMW)}
    of_muon = {key: value for key, value in options.items() if not key.startswith(OF_ADAMW)}
    of_adamw.pop("lr", None)  # the settings have it
    return Together(
        [
            _build("muon", matrices, spec=spec, options=of_muon),
            _build("adamw", others, spec=spec, options=of_adamw),
        ]
    )


def check_options(job: Job) -> None:
    """Raises ValueError where the job's optimizer does not take its options."""
    example = nn.Parameter(torch.zeros(2, 2))
    build_optimizer(job, [example], settings={example: ParameterSettings(lr=job.optimizer.lr, is_matrix=True)})


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
    of_schedule = schedule_factor(job.schedule, step, num_steps=job.total_steps)
    for group in optimizer.param_groups:
        group["lr"] = group[FIRST_RATE] * of_schedule
    optimizer.step()


def _options(spec: OptimizerSpec) -> dict[str, Any]:
    known = OPTIMIZER_OPTIONS[spec.name]
    if unknown := sorted(set(spec.options) - set(known)):
        raise ValueError(f"optimizer {spec.name}: has no option {unknown[0]}. To fix: use some of {', '.join(known)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in spec.options.items()}


def _build(
    name: str,
    groups: Mapping[ParameterSettings, list[nn.Parameter]],
    *,
    spec: OptimizerSpec,
    options: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Returns the optimizer `name`, gathering parameters that ranks hold in parts where it needs whole ones."""
    given: list[dict[str, Any]] = [
        {"params": group, "lr": key.lr, FIRST_RATE: key.lr}
        | ({} if key.weight_decay is None else {"weight_decay": key.weight_decay})
        for key, group in groups.items()
    ]
    given = given or [
        {"params": [], FIRST_RATE: spec.lr}
    ]  # a rank may own no parameter; unlike a list, a group may be empty
    cls, arguments = CLASSES[name], {"lr": spec.lr, **KERNELS.get(name, {}), **options}
    is_divided = any(isinstance(p, DTensor) for group in groups.values() for p in group)
    try:
        if name in OF_WHOLE_TENSORS and is_divided:
            return WholeTensors(cls, given, **arguments)
        return cls(given, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer {spec.name}: {error}. To fix: correct its options") from error
