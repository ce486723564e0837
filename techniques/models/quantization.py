"""Quantized models: quantization by torchao, and loading from a folder (`export.export_quantized` writes it).

The folder has the layout of compressed-tensors (github.com/vllm-project/compressed-tensors), which transformers and
vLLM read: for each linear layer `weight` in int8 ("int-quantized") or eight values of `weight_packed` in an int32
("pack-quantized"), `weight_scale` in fp32 for each row or group of a row, and a `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.compat.torchao import quieted
from ringmaster.extras import require_extra
from ringmaster.techniques.job import INT4_METHODS, INT8_METHODS, AdaptationSpec
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.models.model_folders import WEIGHTS

INT8, INT8_WEIGHTS, INT4, INT4_WEIGHTS = INT8_METHODS + INT4_METHODS
QUANTIZED_DATA = "qdata"
"""The attribute of torchao's tensors with the integers."""
PACKED, PACKED_BITS, OFFSET = 8, 4, 8
"""The values of an int32, the bits of each, and what is added to it so that none is negative."""


def int4_layers(model: nn.Module, *, group_size: int) -> tuple[str, ...]:
    """Returns the names of the linear layers that are rounded to 4 bits.

    Those are in the repeated layers, and groups of weights divide their rows. So embeddings and a head are not among
    them. Raises ValueError where there are none.
    """
    names = tuple(
        name
        for layer in layer_names(model)
        for name, module in model.get_submodule(layer).named_modules(prefix=layer)
        if isinstance(module, nn.Linear) and module.in_features % group_size == 0
    )
    if not names:
        raise ValueError(
            f"adaptation: {type(model).__name__} has no linear layers (torch.nn.Linear) in repeated layers whose "
            f"inputs are a multiple of {group_size}. To fix: set adaptation.group_size to a divisor of its width"
        )
    return names


def torchao_config(method: str | None, *, group_size: int) -> Any:
    """Returns torchao's config of a method of quantization; importing torchao takes a second."""
    quieted()
    from torchao import quantization

    if method == INT8:
        return quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    if method == INT8_WEIGHTS:
        return quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    int4, groups = getattr(torch, "int4"), quantization.PerGroup(group_size)  # noqa: B009 - torch types lack it
    if method == INT4_WEIGHTS:
        return quantization.IntxWeightOnlyConfig(weight_dtype=int4, granularity=groups)
    return quantization.Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=groups)


def quantize(model: nn.Module, adaptation: AdaptationSpec) -> dict[str, Any]:
    """Quantizes linear layers, in place; returns the method, the layers' names as "modules", and their groups.

    With the weights W [out, in] of a row, or of a group of one, and the scale s = max |W| / ((2^bits - 1) / 2):

        weight-only    y = x (s Q)^T + b,  Q = round(W / s)    saves memory; the product is in floating point
        dynamic        y = t s (P Q^T) + b,  x ~ t P           rows of x in int8 too, with their own scales t

    Raises ValueError where no layer suits, or torchao is not installed.
    """
    require_extra("torchao", feature="quantization")
    names = _int8_layers(model) if adaptation.method in INT8_METHODS else None
    modules = [*(names or int4_layers(model, group_size=adaptation.group_size))]
    quantization = {"method": adaptation.method, "modules": modules, "group_size": adaptation.group_size}
    _apply(model, quantization)
    return quantization


def _int8_layers(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of all linear layers but a head that shares its weight with the embedding."""
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    names = tuple(name for name, module in linears if id(module.weight) not in shared)
    if not names or "" in names:
        raise ValueError(
            "quantization: the model has no linear layers (torch.nn.Linear) inside. "
            "To fix: quantize a model that has some"
        )
    return names


def _apply(model: nn.Module, quantization: Mapping[str, Any]) -> None:
    names = frozenset(quantization["modules"])
    for name in names:
        if not isinstance(model.get_submodule(name), nn.Linear):
            raise AttributeError(f"{name} is not a linear layer")
    config = torchao_config(quantization["method"], group_size=quantization.get("group_size", 1))
    from torchao.quantization import quantize_

    quantize_(model, config, filter_fn=lambda _, name: name in names)
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(_as_weight)


def _as_weight(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: torchao's products in 4 bits require inputs of the weight's dtype, also under autocast."""
    return (args[0].to(module.weight.dtype), *args[1:])


def is_quantized(model: nn.Module) -> bool:
    """Returns whether a model has layers in 8 or 4 bits."""
    return any(hasattr(module.weight, QUANTIZED_DATA) for module in model.modules() if isinstance(module, nn.Linear))


def check_trainable(model: nn.Module) -> None:
    """Raises ValueError for a quantized model."""
    if is_quantized(model):
        raise ValueError(
            "the model is quantized, and a quantized model is not trained further. "
            "To fix: train what it was quantized from, and quantize the result"
        )


def stored_tensors(model: nn.Module, quantization: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of the quantized weights as compressed-tensors names them."""
    tensors: dict[str, Tensor] = {}
    for name in quantization["modules"]:
        weight: Any = model.get_submodule(name).weight
        tensors[f"{name}.weight_scale"] = weight.scale.cpu().contiguous()
        if quantization["method"] == INT4_WEIGHTS:
            tensors[f"{name}.weight_packed"] = packed(weight.qdata.cpu())
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        else:
            tensors[f"{name}.weight"] = weight.qdata.cpu().contiguous()
    return tensors


def packed(values: Tensor) -> Tensor:
    """Returns int8 values from -8 to 7 [n, m], eight in an int32 [n, m / 8], the first in the lowest bits."""
    digits = (values.to(torch.int64) + OFFSET).reshape(len(values), -1, PACKED)
    shifted = torch.bitwise_left_shift(digits, PACKED_BITS * torch.arange(PACKED))
    return shifted.sum(-1).to(torch.int32)  # which keeps the lowest 32 bits


def unpacked(values: Tensor) -> Tensor:
    """Returns what `packed` has packed."""
    shifted = torch.bitwise_right_shift(values.unsqueeze(-1), PACKED_BITS * torch.arange(PACKED))
    digits = torch.bitwise_and(shifted, 2**PACKED_BITS - 1)
    return (digits - OFFSET).flatten(1).to(torch.int8)


@torch.no_grad()
def load_quantized(model: nn.Module, folder: Path, quantization: Mapping[str, Any]) -> nn.Module:
    """Fills a fresh, plain `model` with the quantized weights in `folder`.

    quantization: the result of `quantization_of(folder)`.
    Raises ValueError where the weights do not match the model, or torchao is not installed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    require_extra("torchao", feature=f"the quantized model in {folder}")
    remedy = f"To fix: give the model that the one in {folder} was quantized from"
    try:
        _apply(model, quantization)
        tensors = load_file(folder / WEIGHTS)
        for name in quantization["modules"]:
            weight: Any = model.get_submodule(name).weight
            is_packed = tensors.pop(f"{name}.weight_shape", None) is not None
            stored = unpacked(tensors.pop(f"{name}.weight_packed")) if is_packed else tensors.pop(f"{name}.weight")
            for own, value in ((weight.qdata, stored), (weight.scale, tensors.pop(f"{name}.weight_scale"))):
                if own.shape != value.shape:
                    raise ValueError(f"{name}.weight is {list(value.shape)}, not {list(own.shape)}")
                own.copy_(value)
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except (AttributeError, KeyError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise ValueError(f"model: the quantized weights in {folder} do not fit: {error}. {remedy}") from error
    own_tensors = model.state_dict(keep_vars=True)
    filled = {id(own_tensors[name]) for name in own_tensors.keys() - {*missing}}  # a shared tensor is stored once
    filled |= {id(own_tensors[f"{name}.weight"]) for name in quantization["modules"]}
    if wrong := sorted([*(name for name in missing if id(own_tensors[name]) not in filled), *unexpected]):
        raise ValueError(f"model: the quantized weights in {folder} do not fit: {', '.join(wrong[:3])}. {remedy}")
    return model


def compressed_tensors(model: nn.Module, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of compressed-tensors: weights by row or group, inputs by token."""
    method, plain = quantization["method"], {"type": "int", "symmetric": True}
    inputs = {**plain, "num_bits": 8, "symmetric": method == INT8, "strategy": "token", "dynamic": True}
    in_rows = {"num_bits": 8, "strategy": "channel"}
    in_groups = {"num_bits": 4, "strategy": "group", "group_size": quantization.get("group_size")}
    weights = {**plain, "dynamic": False, **(in_rows if method in INT8_METHODS else in_groups)}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layout = "pack-quantized" if method == INT4_WEIGHTS else "int-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": [name for name in linears if name not in {*quantization["modules"]}],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": layout,
                "weights": weights,
                "input_activations": inputs if method in (INT8, INT4) else None,
            },
        },
    }
