"""Freezing of parameters by glob patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from ringmaster.techniques.job import Job, OptimizerSpec
from ringmaster.techniques.models.layers import layer_names

MOST_LISTED = 5


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
        frozen = _is_frozen(name, patterns)
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
    near = near or get_close_matches(literal, names, n=MOST_LISTED, cutoff=0.4)
    listed = (near or [*names[:2], *names[-2:]])[:MOST_LISTED]
    return f"match names such as {', '.join(listed)}"


def _is_frozen(name: str, patterns: Sequence[str]) -> bool:
    matching = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(matching) and not matching[-1].startswith("!")


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
    _check_groups(spec, [name for aliases in names.values() for name in aliases])
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


def _check_groups(spec: OptimizerSpec, names: list[str]) -> None:
    for i, group in enumerate(spec.groups):
        if not any(fnmatchcase(name, group.match) for name in names):
            raise ValueError(
                f"optimizer.groups[{i}].match: {group.match!r} matches no trained parameter. "
                f"To fix: {resembling(group.match, names)}"
            )
