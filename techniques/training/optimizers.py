"""The optimizer of a job, its learning-rate schedule, and the steps that they take, independent of parallelism."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ringmaster.compat.torch import foreach_add_, foreach_mul, foreach_mul_, foreach_sign_
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import OF_WHOLE_TENSORS, OPTIMIZER_OPTIONS, OptimizerSpec
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.training.gradients import local, local_part, scale_, whole

MAX_LISTED = 5


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters that `patterns` match, in place: as in a .gitignore, the last matching pattern decides.

    A pattern that begins with "!" takes parameters out again. Raises ValueError where a pattern matches no parameter,
    where nothing is frozen or nothing is left to train, and where only one of the names of a shared parameter matches.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for i, pattern in enumerate(patterns):
        glob = pattern.removeprefix("!")
        if not any(fnmatchcase(name, glob) for name, _ in named):
            names = [name for name, _ in named]
            raise ValueError(f"freeze[{i}]: {pattern!r} matches no parameter. To fix: {resembling(glob, names)}")
    first: dict[int, tuple[str, bool]] = {}
    for name, parameter in named:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
        frozen = bool(matching) and not matching[-1].startswith("!")
        other, was = first.setdefault(id(parameter), (name, frozen))
        if was != frozen:
            raise ValueError(
                f"freeze: {other} and {name} are one weight, and only one of the names is frozen. "
                "To fix: freeze both names, or neither"
            )
        parameter.requires_grad_(parameter.requires_grad and not frozen)
    if not any(is_frozen for _, is_frozen in first.values()):
        raise ValueError(f"freeze: {list(patterns)} freezes nothing. To fix: remove it, or begin it with '*'")
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError(
            f"freeze: {list(patterns)} leaves no parameter to train. "
            f"To fix: take some out again, such as '!{named[-1][0]}'"
        )


def resembling(pattern: str, names: Iterable[str]) -> str:
    """Returns the remedy for a pattern that matches none of `names`: those that resemble it."""
    names = list(dict.fromkeys(names))
    literal = max(pattern.split("*"), key=len)
    near = [name for name in names if literal.strip(".") and literal.strip(".") in name]
    near = near or get_close_matches(literal, names, n=MAX_LISTED, cutoff=0.4)
    listed = (near or [*names[:2], *names[-2:]])[:MAX_LISTED]
    return f"match names such as {', '.join(listed)}"


@dataclass(frozen=True, kw_only=True)
class ParameterSettings:
    """The settings of one parameter.

    lr: its learning rate before the schedule.
    weight_decay: None for the optimizer's.
    is_matrix: whether Muon updates it, and not AdamW.
    """

    lr: float
    weight_decay: float | None = None
    is_matrix: bool = False


def parameter_settings(job: Job, model: nn.Module) -> Mapping[str, ParameterSettings]:
    """Returns the settings of each trained parameter of a whole model, by each of its names.

    Raises ValueError where a group matches no trained parameter, or the model has no layers that the optimizer needs.
    """
    spec = job.optimizer
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = _all_names(model, trained)
    matrices = hidden_matrices(model) & trained.keys() if spec.name == "muon" else frozenset()
    if spec.name == "muon" and not matrices:
        raise ValueError(
            "optimizer muon: no trained matrix is in repeated layers of the model, and muon is for these. "
            "To fix: take adamw"
        )
    factors = _layer_factors(model, spec.layer_decay) if spec.layer_decay is not None else {}
    settings = {}
    for name, parameter in trained.items():
        rate = spec.lr if name in matrices else spec.options.get("adamw_lr", spec.lr)
        undecayed = not spec.decay_norms_and_biases and parameter.dim() < 2
        plain = ParameterSettings(
            lr=rate * factors[name] if factors else rate,
            weight_decay=0.0 if undecayed else None,
            is_matrix=name in matrices,
        )
        settings[name] = _in_groups(plain, names[name], spec)
    _check_groups(spec, names)
    return {alias: settings[name] for name, aliases in names.items() for alias in aliases}


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Returns the names of the matrices in the repeated layers, without embeddings: those that Muon is for."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = tuple(f"{layer}." for layer in layer_names(model))
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and name.startswith(layers) and id(parameter) not in embeddings
    )


def _layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Returns decay^(L + 1 - depth) by parameter: see `OptimizerSpec.layer_decay`.

    The order of the model's modules is taken as the order of execution. What is between two layers has the depth of
    the first of them.
    """
    layers = layer_names(model)
    if not layers:
        raise ValueError("optimizer.layer_decay: the model has no repeated layers. To fix: remove it, or use groups")
    depth_of = {
        name: depth
        for depth, layer in enumerate(layers, start=1)
        for name, _ in model.named_parameters()
        if name.startswith(f"{layer}.")
    }
    names = [name for name, _ in model.named_parameters()]
    last = max(i for i, name in enumerate(names) if name in depth_of)
    factors, depth = {}, 0
    for i, name in enumerate(names):
        depth = len(layers) + 1 if i > last else depth_of.get(name, depth)
        factors[name] = decay ** (len(layers) + 1 - depth)
    return factors


def _all_names(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """Returns all names of each trained parameter, its first name first; a tied one has several."""
    first = {id(parameter): name for name, parameter in trained.items()}
    names: dict[str, list[str]] = {name: [] for name in trained}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            names[first[id(parameter)]].append(name)
    return names


def _in_groups(settings: ParameterSettings, names: list[str], spec: OptimizerSpec) -> ParameterSettings:
    for group in spec.groups:
        if any(fnmatchcase(name, group.match) for name in names):
            settings = replace(
                settings,
                lr=settings.lr if group.lr is None else group.lr,
                weight_decay=settings.weight_decay if group.weight_decay is None else group.weight_decay,
            )
    return settings


def _check_groups(spec: OptimizerSpec, names: Mapping[str, list[str]]) -> None:
    """Raises ValueError where a group has no effect. names: all names of each trained parameter."""
    effective: dict[tuple[str, str], int] = {}  # by parameter and setting, the last group that sets it
    matched = [
        [name for name in names if any(fnmatchcase(each, group.match) for each in names[name])] for group in spec.groups
    ]
    for i, group in enumerate(spec.groups):
        given = [key for key in ("lr", "weight_decay") if getattr(group, key) is not None]
        effective |= dict.fromkeys(product(matched[i], given), i)
    for i in sorted({*range(len(spec.groups))} - {*effective.values()}):
        match, known = spec.groups[i].match, list(chain.from_iterable(names.values()))
        raise ValueError(
            f"optimizer.groups[{i}]: has no effect: it sets nothing, or later groups set it anew for all "
            f"parameters that {match!r} matches. To fix: remove it, or put it after them"
            if matched[i]
            else f"optimizer.groups[{i}].match: {match!r} matches no trained parameter. "
            f"To fix: {resembling(match, known)}"
        )


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
    kernels: Mapping[str, bool] | None = None,
) -> torch.optim.Optimizer:
    """Returns the job's optimizer with its quickest kernels, and a group for parameters of equal settings.

    settings: of each parameter; the job's learning rate, and no more, where there are none.
    kernels: the arguments that choose kernels; None for the plain ones.
    Raises ValueError on an unknown option.
    """
    spec, of = job.optimizer, settings or {}
    groups: dict[ParameterSettings, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(of.get(parameter, ParameterSettings(lr=spec.lr)), []).append(parameter)
    if spec.name != "muon":
        return _build(
            spec.name, groups, job=job, options={**_options(spec), **(kernels or {})}, has_kernels=bool(kernels)
        )
    matrices = {key: group for key, group in groups.items() if key.is_matrix}
    others = {key: group for key, group in groups.items() if not key.is_matrix}
    options = _options(spec)
    of_adamw = {key.removeprefix(OF_ADAMW): value for key, value in options.items() if key.startswith(OF_ADAMW)}
    of_muon = {key: value for key, value in options.items() if not key.startswith(OF_ADAMW)}
    of_adamw.pop("lr", None)  # the settings have it
    return CombinedOptimizer(
        [
            _build("muon", matrices, job=job, options=of_muon),
            _build("adamw", others, job=job, options=of_adamw),
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
    place, length = job.schedule_place(step)
    of_schedule = job.schedule.factor(place, num_steps=length) * job.phase(step).lr_factor
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
    job: Job,
    options: Mapping[str, Any],
    has_kernels: bool = False,
) -> torch.optim.Optimizer:
    """Returns the optimizer `name`, gathering parameters that ranks hold in parts where it needs whole ones."""
    spec = job.optimizer
    given: list[dict[str, Any]] = [
        {"params": group, "lr": key.lr, FIRST_RATE: key.lr}
        | ({} if key.weight_decay is None else {"weight_decay": key.weight_decay})
        for key, group in groups.items()
    ]
    given = given or [
        {"params": [], FIRST_RATE: spec.lr}
    ]  # a rank may own no parameter; unlike a list, a group may be empty
    kernels = {} if has_kernels else KERNELS.get(name, {})
    cls, arguments = CLASSES[name], {"lr": spec.lr, **kernels, **options}
    if job.is_exact and name == "adamw" and not has_kernels:
        cls = AlignedAdamW
    is_divided = any(isinstance(p, DTensor) for group in groups.values() for p in group)
    try:
        if name in OF_WHOLE_TENSORS and is_divided:
            return GatheringOptimizer(cls, given, **arguments)
        return cls(given, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer {spec.name}: {error}. To fix: correct its options") from error


class Lion(torch.optim.Optimizer):
    """Updates each element by the learning rate in the direction of its averaged gradient (algorithm 2).

    With w a weight, g its gradient, m the average (state `exp_avg`), betas = (b1, b2) and lambda the weight decay:

        w <- (1 - lr lambda) w - lr sign(b1 m + (1 - b1) g)
        m <- b2 m + (1 - b2) g

    Every element is updated by itself, so each rank may update the part of a parameter that it holds.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675).
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
            direction = foreach_mul(averages, beta1)
            foreach_add_(direction, gradients, alpha=1.0 - beta1)
            foreach_sign_(direction)
            foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
            foreach_add_(weights, direction, alpha=-rate)
            foreach_mul_(averages, beta2)
            foreach_add_(averages, gradients, alpha=1.0 - beta2)


VECTOR = 16  # fp32 elements of the widest vector of a CPU


class AlignedAdamW(torch.optim.AdamW):
    """AdamW by PyTorch's fused kernel, with the same bits for an element wherever it lies in a tensor.

    On CPUs the kernel computes whole vectors of elements, and those at the end of a tensor one by one, which may round
    differently. Here elements that fill no vector are copied into one of their own.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
            parts: list[list[Tensor]] = []
            steps: list[Tensor] = []
            ends: list[tuple[Tensor, Tensor]] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in names}
                    state["step"] = torch.zeros((), device=parameter.device)
                tensors = [local(each).view(-1) for each in (parameter, *(state[name] for name in names))]
                tensors.insert(1, local(parameter.grad).reshape(-1))
                size = len(tensors[0]) // VECTOR * VECTOR
                if size:
                    parts.append([each[:size] for each in tensors])
                    steps.append(state["step"].clone())  # `adamw` adds 1 to each
                if size < len(tensors[0]):
                    rest = [each[size:] for each in tensors]
                    parts.append([nn.functional.pad(each, (0, VECTOR - len(each))) for each in rest])
                    steps.append(state["step"].clone())
                    ends += zip(rest, parts[-1], strict=True)
                state["step"] += 1
            if parts:
                weights, gradients, averages, squares, *largest = [list(each) for each in zip(*parts, strict=True)]
                adamw(
                    weights,
                    gradients,
                    averages,
                    squares,
                    largest[0] if largest else [],
                    steps,
                    fused=True,
                    amsgrad=group["amsgrad"],
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
            for end, padded in ends:
                end.copy_(padded[: len(end)])


class GatheringOptimizer(torch.optim.Optimizer):
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
        local(parameter).copy_(local_part(gathered, parameter))
        for key, value in inner.state[gathered].items():
            state[key] = self._divided(value, parameter, state.get(key)) if value.shape == parameter.shape else value

    def _divided(self, value: Tensor, parameter: nn.Parameter, before: Tensor | None) -> Tensor:
        """The rank's part of a state of the parameter's shape, in the parameter's layout."""
        kept = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False) if before is None else before
        local(kept).copy_(local_part(value, parameter))
        return kept


class CombinedOptimizer(torch.optim.Optimizer):
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
        for part in self._parts:
            part.step()


CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adafactor": torch.optim.Adafactor,
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "muon": torch.optim.Muon,
    "sgd": torch.optim.SGD,
}
