"""Builds the optimizer of a job, and takes its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringmaster.techniques.job import OF_WHOLE_TENSORS, OPTIMIZER_OPTIONS, Job, OptimizerSpec, ScheduleSpec
from ringmaster.techniques.training.gradients import local, scale_, share_of, whole
from ringmaster.techniques.training.parameters import ParameterSettings

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


def learning_rate(job: Job, step: int) -> float:
    """Returns the learning rate of step `step` (0-based). It depends on the step alone, so no state is restored."""
    return job.optimizer.lr * schedule_factor(job.schedule, step, num_steps=job.total_steps)


def schedule_factor(schedule: ScheduleSpec, step: int, *, num_steps: int) -> float:
    """Returns the factor of the base learning rate at step `step` of `num_steps`."""
    num_warmup = schedule.num_warmup_steps(num_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    first = num_steps - schedule.num_decay_steps(num_steps) if schedule.name == "wsd" else num_warmup
    if schedule.name == "constant" or step < first:
        return 1.0
    progress = (step - first) / max(num_steps - first, 1)
    factor = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
    return factor * (1.0 - schedule.min_lr_ratio) + schedule.min_lr_ratio


class Lion(torch.optim.Optimizer):
    """Updates each element by the learning rate in the direction of its averaged gradient (algorithm 2).

    With w a weight, g its gradient, m the average (state `exp_avg`), betas = (b1, b2) and lambda the weight decay:

        w <- (1 - lr lambda) w - lr sign(b1 m + (1 - b1) g)
        m <- b2 m + (1 - b2) g

    Every element is updated by itself, so each rank may update the part of a parameter that it holds.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1, not {betas}")
        if weight_decay < 0.0:
            raise ValueError(f"weight_decay must be at least 0, not {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            updated = [p for p in group["params"] if p.grad is not None]
            if not updated:  # the foreach operators refuse empty lists
                continue
            for parameter in updated:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            weights, gradients = [local(p) for p in updated], [local(p.grad) for p in updated]
            averages = [local(self.state[p]["exp_avg"]) for p in updated]
            rate, (beta1, beta2) = group["lr"], group["betas"]
            direction = torch._foreach_mul(averages, beta1)
            torch._foreach_add_(direction, gradients, alpha=1.0 - beta1)
            torch._foreach_sign_(direction)
            torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
            torch._foreach_add_(weights, direction, alpha=-rate)
            torch._foreach_mul_(averages, beta2)
            torch._foreach_add_(averages, gradients, alpha=1.0 - beta2)


class WholeTensors(torch.optim.Optimizer):
    """Takes the steps of an optimizer that needs whole tensors, on DTensors of which each rank holds a part.

    One parameter at a time, every rank gathers the weight, its gradient and its state, takes the same step on them, and
    keeps its part of the result. So the state of the parameter's shape stays divided as the parameter is, and one whole
    tensor, with its gradient and state, is in memory at a time. All other state is equal on all ranks.
    """

    def __init__(
        self, kind: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any
    ) -> None:
        self._kind = kind
        example = kind([nn.Parameter(torch.zeros(1, 1))], **options)
        super().__init__(groups, example.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient. All ranks that hold parts of them must call it together."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gathered, state = nn.Parameter(whole(parameter.detach())), self.state[parameter]
        gathered.grad = whole(parameter.grad)  # type: ignore[arg-type]
        inner = self._kind([{**group, "params": [gathered]}])
        inner.state[gathered] = {key: whole(value) for key, value in state.items()}
        inner.step()
        local(parameter).copy_(share_of(gathered, parameter))
        for key, value in inner.state[gathered].items():
            state[key] = self._divided(value, parameter, state.get(key)) if value.shape == parameter.shape else value

    def _divided(self, value: Tensor, parameter: nn.Parameter, before: Tensor | None) -> Tensor:
        """The rank's part of a state of the parameter's shape, in the parameter's layout."""
        kept = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False) if before is None else before
        local(kept).copy_(share_of(value, parameter))
        return kept


class Together(torch.optim.Optimizer):
    """Several optimizers of different parameters as one: their groups one after another, and all their state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.defaults.update(part.defaults)
            part.state = self.state  # the groups are shared already

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step of each optimizer."""
        assert closure is None, "the gradients are there already"
        for part in self._parts:
            part.step()


CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adafactor": torch.optim.Adafactor,
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "muon": torch.optim.Muon,
    "sgd": torch.optim.SGD,
}
