"""What techniques and the planner must know of a model, found out on the meta device, before any weight exists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ringmaster.techniques.engine.data.prepared import PreparedData
from ringmaster.techniques.engine.losses import loss_of
from ringmaster.techniques.engine.models.build import skeleton
from ringmaster.techniques.engine.models.decoder import Decoder, decoder_of
from ringmaster.techniques.job import Adapter, ModelSpec
from ringmaster.techniques.values import SINCE_LATER, from_json, to_json

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a technique must know of a model.

    num_parameters counts shared ones once, and an adapter's too. num_trained: those that are trained, None for all.
    parameter_bytes: in fp32. num_layers: repeated ones, see `layer_names`.
    largest_layer_bytes: of the largest part that is gathered at once: a repeated layer, or all outside of them.
    has_dropout: training draws random numbers. has_experts: tokens are routed to some of several.
    decoder: how a causal language model is built, None for any other model.
    computes_loss: the model itself does, where the job names no loss, and out of more than logits.
    undivided: what several adapters cannot have of their own at once, in words: of `modules_to_save`, or of samples.
    scalar: a parameter that is a single number, which cannot be sharded; empty where there is none.
    whole_batch: why the job's batch must not be divided, in words; empty where it may be (`engine.probing`).
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
        """Parameters that have a gradient and an optimizer's state."""
        return self.num_parameters if self.num_trained is None else self.num_trained


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what configs of Hugging Face models call them

# Of a model that only its command knows.
UNKNOWN = ModelFacts(
    num_parameters=0,
    parameter_bytes=0,
    largest_layer_bytes=0,
    num_layers=0,
    has_dropout=False,
)


def model_facts(spec: ModelSpec, *, data: PreparedData, adapter: Adapter | None = None) -> ModelFacts:
    """The facts of the model that `build_model` would build, with the adapter that it is trained with; cached.

    Raises its ValueErrors, except on weights, and those of `adapters.attaching.attach`.
    """
    if spec.command is not None:
        return UNKNOWN
    return _facts(json.dumps([to_json(spec), to_json(data), to_json(adapter)], sort_keys=True))


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the repeated layers in order of execution, as far as their order in the module tells.

    These are the elements of the outermost `ModuleList`s (decoder layers, transformer blocks, the stages of a
    ResNet); in a model without one, those children of its largest `Sequential` that have parameters. None may be
    nested.
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
    """Whether a model routes each token to some of several experts, each of which so computes some rows of a batch."""
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
    """Puts the adapter on, and counts what is trained."""
    from ringmaster.techniques.adapters.attaching import attach

    attach(model, adapter, seed=0)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _layers(model: nn.Module, name: str) -> Iterator[str]:
    """The children of the list `name`; a list inside a list is never called itself, only its elements are."""
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
    """Whether a module drops out itself, or keeps a rate for a functional dropout (`attention_dropout`, ...)."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any(
        isinstance(value, float) and value > 0
        for name, value in vars(module).items()
        if "dropout" in name or "drop_prob" in name or "layerdrop" in name
    )


def _num(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
