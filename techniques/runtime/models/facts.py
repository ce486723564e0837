"""Facts about a model for techniques and the planner, computed on the meta device before any weight exists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ringmaster.techniques.interface.job import Adapter, ModelSpec
from ringmaster.techniques.interface.values import SINCE_LATER, from_json, to_json
from ringmaster.techniques.runtime.data.prepared import PreparedData
from ringmaster.techniques.runtime.models.build import skeleton
from ringmaster.techniques.runtime.models.decoder import Decoder, decoder_of
from ringmaster.techniques.runtime.training.losses import loss_of

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts that a technique must know about a model.

    num_parameters: the number of parameters, with an adapter's; shared ones count once.
    parameter_bytes: the size of all parameters in fp32.
    largest_layer_bytes: the size of the largest part that is gathered at once: a repeated layer, or all parameters
        outside of the repeated layers.
    num_layers: the number of repeated layers, see `layer_names`.
    has_dropout: whether training draws random numbers.
    decoder: the structure of a causal language model, None for any other model.
    num_trained: the number of trained parameters, None for all.
    has_experts: whether tokens are routed to some of several experts.
    undivided: what several adapters in one batch cannot each have of their own, as a message about `modules_to_save`
        or about tensors of the samples; empty if there is nothing.
    computes_loss: whether the model itself computes the loss, from more than logits, when the job names no loss.
    whole_batch: the reason why the job's batch must not be divided; empty if it may be (`runtime.probing`).
    scalar: the name of a parameter that is a single number, which cannot be sharded; empty if there is none.
    """

    num_parameters: int
    parameter_bytes: int
    largest_layer_bytes: int
    num_layers: int
    has_dropout: bool
    decoder: Decoder | None = None
    num_trained: int | None = field(default=None, metadata=SINCE_LATER)
    has_experts: bool = field(default=False, metadata=SINCE_LATER)
    undivided: str = field(default="", metadata=SINCE_LATER)
    computes_loss: bool = field(default=False, metadata=SINCE_LATER)
    whole_batch: str = field(default="", metadata=SINCE_LATER)
    scalar: str = field(default="", metadata=SINCE_LATER)

    @property
    def num_updated(self) -> int:
        """The number of parameters that have a gradient and optimizer state."""
        return self.num_parameters if self.num_trained is None else self.num_trained


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # their names in configs of Hugging Face models

# The facts of a command's model, which only the command knows.
UNKNOWN = ModelFacts(
    num_parameters=0,
    parameter_bytes=0,
    largest_layer_bytes=0,
    num_layers=0,
    has_dropout=False,
)


def model_facts(spec: ModelSpec, *, data: PreparedData, adapter: Adapter | None = None) -> ModelFacts:
    """The facts of the model that `build_model` would build, with the adapter that it is trained with; cached.

    Raises the ValueErrors of `build_model`, except those about weights, and those of `adapters.attaching.attach`.
    """
    if spec.command is not None:
        return UNKNOWN
    return _facts(json.dumps([to_json(spec), to_json(data), to_json(adapter)], sort_keys=True))


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the repeated layers, in the order of the modules, which is taken as the order of execution.

    The layers are the elements of the outermost `ModuleList`s (decoder layers, transformer blocks, the stages of a
    ResNet). In a model without a `ModuleList`, they are the children of its largest `Sequential` that have parameters.
    No layer contains another one.
    """
    lists = _outermost(model, nn.ModuleList)
    if not lists:
        lists = sorted(_outermost(model, nn.Sequential), key=lambda name: -_num(model.get_submodule(name)))[:1]
    return tuple(layer for name in lists for layer in _layers(model, name))


@lru_cache(maxsize=256)
def _facts(key: str) -> ModelFacts:
    spec, data, adapter = json.loads(key)
    spec = from_json(ModelSpec, spec)
    model = skeleton(spec, from_json(PreparedData, data))
    layers = [model.get_submodule(name) for name in layer_names(model)]
    decoder = decoder_of(model, layers, from_json(PreparedData, data))  # of the model before it is adapted
    undivided = "" if adapter is None else _undivided(model, from_json(Adapter, adapter))
    num_trained = None if adapter is None else _adapted(model, from_json(Adapter, adapter))
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = sum(p.numel() for p in model.parameters() if id(p) not in in_layers)
    return ModelFacts(
        num_parameters=_num(model),
        parameter_bytes=_num(model) * FP32_BYTES,
        largest_layer_bytes=max([outside, *map(_num, layers)]) * FP32_BYTES,
        num_layers=len(layers),
        has_dropout=any(_drops_out(module) for module in model.modules()),
        decoder=decoder,
        num_trained=num_trained,
        has_experts=has_experts(model),
        undivided=undivided,
        scalar=next((name for name, parameter in model.named_parameters() if parameter.dim() == 0), ""),
        computes_loss=loss_of(None, model, spec).is_models,
    )


def has_experts(model: nn.Module) -> bool:
    """Whether a model routes each token to some of several experts, so that an expert computes a part of its rows."""
    config: Any = getattr(model, "config", None)
    return any((getattr(config, name, None) or 0) > 1 for name in EXPERTS)


def _undivided(model: nn.Module, adapter: Adapter) -> str:
    from ringmaster.techniques.adapters.leaves import own_leaves
    from ringmaster.techniques.adapters.peft_format import resolved

    adapter = resolved(adapter)
    try:
        own_leaves(model, adapter)
    except ValueError as error:
        return str(error).removeprefix("adapter: ")
    return ""


def _adapted(model: nn.Module, adapter: Adapter) -> int:
    """Attaches the adapter and returns the number of trained parameters."""
    from ringmaster.techniques.adapters.attaching import attach

    attach(model, adapter, seed=0)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _layers(model: nn.Module, name: str) -> Iterator[str]:
    """The layers in the list `name`. A nested list is replaced by its elements, because it is never called itself."""
    for child, layer in model.get_submodule(name).named_children():
        path = f"{name}.{child}" if name else child
        if isinstance(layer, nn.ModuleList):
            yield from _layers(model, path)
        elif _num(layer):
            yield path


def _outermost(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    found: list[str] = []
    for name, module in model.named_modules():
        inside: Iterable[str] = (outer for outer in found if not outer or name.startswith(f"{outer}."))
        if isinstance(module, kind) and _num(module) and not any(inside):
            found.append(name)
    return found


def _drops_out(module: nn.Module) -> bool:
    """Whether a module is a dropout, or stores a rate for a functional dropout (`attention_dropout`, ...)."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any(
        isinstance(value, float) and value > 0
        for name, value in vars(module).items()
        if "dropout" in name or "drop_prob" in name or "layerdrop" in name
    )


def _num(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
