"""Facts about a model for techniques and the planner, computed on the meta device before any weight exists."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import nn

from ringmaster.codec import from_json, to_json
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job_features import base_changes as changes_in
from ringmaster.techniques.job_specs import Adapter, ModelSpec
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.models.adapters import attach, own_leaves
from ringmaster.techniques.models.build import skeleton
from ringmaster.techniques.models.layers import DROPOUTS, decoder_of, layer_names, num_parameters
from ringmaster.techniques.models.peft_format import resolved
from ringmaster.techniques.sharding.experts import expert_modules, has_router_loss
from ringmaster.techniques.training.bound_loss import bind_loss
from ringmaster.techniques.training.optimizers import freeze

FP32_BYTES = 4


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # their names in configs of Hugging Face models

# The facts of a black box's model, which its trainer alone knows.
UNKNOWN = ModelFacts(
    num_parameters=0,
    parameter_bytes=0,
    largest_layer_bytes=0,
    num_layers=0,
    has_dropout=False,
)


def model_facts(
    spec: ModelSpec,
    *,
    data: PreparedData,
    adapter: Adapter | None = None,
    frozen: Sequence[str] = (),
    base_changes: Mapping[str, str] | None = None,
) -> ModelFacts:
    """The facts of the model that `build_model` would build, with the adapter that it is trained with; cached.

    frozen: patterns of the parameters that are not trained.
    base_changes: what changes the weights below the adapter, as in `Job.base_changes`.
    Raises the ValueErrors of `build_model`, except those about weights, of `adapters.attach`, and of
    `training.optimizers.freeze`.
    """
    if spec.command is not None:
        return UNKNOWN
    key = [to_json(spec), to_json(data), to_json(adapter), list(frozen), base_changes or {}]
    return _facts(json.dumps(key, sort_keys=True))


@lru_cache(maxsize=256)
def _facts(key: str) -> ModelFacts:
    spec, data, adapter, frozen, changes = json.loads(key)
    spec = from_json(ModelSpec, spec)
    model = skeleton(spec, from_json(PreparedData, data))
    layers = [model.get_submodule(name) for name in layer_names(model)]
    decoder = decoder_of(model, layers, from_json(PreparedData, data))  # of the model before it is adapted
    undivided = "" if adapter is None else _undivided(model, from_json(Adapter, adapter))
    if adapter is not None:
        for change in changes_in(changes):
            change.change_base(model, from_json(Adapter, adapter))
        attach(model, from_json(Adapter, adapter), seed=0)
    if frozen:
        freeze(model, frozen)
    experts = expert_modules(model)
    num_experts = {int(module.num_experts) for module in experts}  # type: ignore[arg-type]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    loss = bind_loss(None, model, spec)
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = sum(p.numel() for p in model.parameters() if id(p) not in in_layers)
    return ModelFacts(
        num_parameters=num_parameters(model),
        parameter_bytes=num_parameters(model) * FP32_BYTES,
        largest_layer_bytes=max([outside, *map(num_parameters, layers)]) * FP32_BYTES,
        num_layers=len(layers),
        has_dropout=any(_drops_out(module) for module in model.modules()),
        decoder=decoder,
        num_trained=trained if frozen or adapter is not None else None,
        has_experts=has_experts(model),
        num_experts=num_experts.pop() if len(num_experts) == 1 else 0,
        expert_bytes=sum(map(num_parameters, experts)) * FP32_BYTES,
        has_router_loss=has_router_loss(model),
        undivided=undivided,
        scalar=next((name for name, parameter in model.named_parameters() if parameter.dim() == 0), ""),
        computes_loss=loss.is_models or loss.function is not None,
    )


def has_experts(model: nn.Module) -> bool:
    """Whether a model routes each token to some of several experts, so that an expert computes a part of its rows."""
    config: Any = getattr(model, "config", None)
    return any((getattr(config, name, None) or 0) > 1 for name in EXPERTS)


def _undivided(model: nn.Module, adapter: Adapter) -> str:
    adapter = resolved(adapter)
    try:
        own_leaves(model, adapter)
    except ValueError as error:
        return str(error).removeprefix("adapter: ")
    return ""


def _drops_out(module: nn.Module) -> bool:
    """Whether a module is a dropout, or stores a rate for a functional dropout (`attention_dropout`, ...)."""
    if isinstance(module, DROPOUTS):
        return module.p > 0
    return any(
        isinstance(value, float) and value > 0
        for name, value in vars(module).items()
        if "dropout" in name or "drop_prob" in name or "layerdrop" in name
    )
