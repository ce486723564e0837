"""The repeated layers of a model, found in its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the repeated layers, in the order of the modules, which is taken as the order of execution.

    The layers are the elements of the outermost `ModuleList`s (decoder layers, transformer blocks, the stages of a
    ResNet). In a model without a `ModuleList`, they are the children of its largest `Sequential` that have parameters.
    No layer contains another one.
    """
    lists = _outermost(model, nn.ModuleList)
    if not lists:
        sequentials = _outermost(model, nn.Sequential)
        lists = sorted(sequentials, key=lambda name: -num_parameters(model.get_submodule(name)))[:1]
    return tuple(layer for name in lists for layer in _layers(model, name))


def num_parameters(module: nn.Module) -> int:
    """Returns the number of a module's parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _layers(model: nn.Module, name: str) -> Iterator[str]:
    """The layers in the list `name`. A nested list is replaced by its elements, because it is never called itself."""
    for child, layer in model.get_submodule(name).named_children():
        path = f"{name}.{child}" if name else child
        if isinstance(layer, nn.ModuleList):
            yield from _layers(model, path)
        elif num_parameters(layer):
            yield path


def _outermost(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    found: list[str] = []
    for name, module in model.named_modules():
        inside: Iterable[str] = (outer for outer in found if not outer or name.startswith(f"{outer}."))
        if isinstance(module, kind) and num_parameters(module) and not any(inside):
            found.append(name)
    return found
