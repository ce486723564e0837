"""Leaf modules with weights inside the modules that an adapter trains directly (`modules_to_save`)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from ringmaster.techniques.interface.job import Adapter
from ringmaster.techniques.models.adapters.attaching import saved_modules

# Modules that map one tensor to one tensor, and compute each sample's output from that sample alone.
BY_SAMPLE = (nn.Linear, Conv1D, nn.LayerNorm, nn.Conv2d)


def own_leaves(model: nn.Module, adapter: Adapter) -> list[str]:
    """Returns names of the childless modules that hold all weights of an adapter's `modules_to_save`.

    Raises ValueError where one mixes the rows of several samples, so that its output for a sample depends on the
    others.
    """
    found = list(dict.fromkeys(name for saved in saved_modules(model, adapter) for name in _with_weights(model, saved)))
    for name in found:
        module = model.get_submodule(name)
        if not _is_by_sample(module) and module is not _input_embeddings(model):
            raise ValueError(f"adapter: {name}, which it trains as it is, is of class {type(module).__name__}")
    return found


def _is_by_sample(module: nn.Module) -> bool:
    if is_norm(type(module)):
        return [name for name, _ in module.named_parameters()] == ["weight"]
    # `nn.MultiheadAttention` reads the weights of its last layer without calling it.
    return isinstance(module, BY_SAMPLE) and not isinstance(module, NonDynamicallyQuantizableLinear)


def is_norm(kind: type[nn.Module]) -> bool:
    """Returns whether modules of a class are RMS norms as in transformers: a weight times the normalised input."""
    return kind.__name__.endswith("RMSNorm") and not issubclass(kind, nn.RMSNorm)


def _with_weights(model: nn.Module, name: str) -> Iterator[str]:
    for path, module in model.get_submodule(name).named_modules(prefix=name):
        if any(True for _ in module.parameters(recurse=False)):
            yield path


def _input_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        found = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Embedding) else None
