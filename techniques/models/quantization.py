"""Quantized models: quantization, and loading from a folder (`export.export_quantized` writes it).

The folder has the layout of compressed-tensors' "int-quantized" models (github.com/vllm-project/compressed-tensors):
`weight` in int8 and `weight_scale` [out, 1] in fp32 for each linear layer, and a `quantization_config`, by which
transformers recognizes quantized weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringmaster.compat.torch import int_mm
from ringmaster.extras import require_extra
from ringmaster.techniques.job import AdaptationSpec
from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.models.layers import PackedLinear, layer_names
from ringmaster.techniques.models.model_folders import WEIGHTS

LARGEST = 127
NF4 = "nf4"
BLOCK = 64  # weights that share a scale in 4 bits
# CUDA's integer product requires more than 16 rows, and widths that are multiples of 8.
FEWEST_ROWS, MULTIPLE = 17, 8


class Int8Linear(nn.Module):
    """A linear layer with `weight` (int8, [out, in]), `weight_scale` (fp32, [out, 1]) and optionally a `bias`.

    All three are buffers, so none of them is trained.

    With a weight W [out, in], a scale s_i = max_j |W_ij| / 127 for each output channel and Q = round(W / s) in int8:

        weight-only    y = x (s Q)^T + b                  saves memory; the product is computed in floating point
        dynamic        y = t s (P Q^T) + b, x ~ t P       rows of x in int8 too, with their own scales t

    Sources: Jacob et al. (arXiv:1712.05877), symmetric and without zero points; Dettmers et al., LLM.int8()
    (arXiv:2208.07339), vector-wise scales.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, *, is_dynamic: bool) -> None:
        super().__init__()
        self.is_dynamic = is_dynamic
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, linear: nn.Linear, *, is_dynamic: bool) -> Int8Linear:
        """Returns the quantized form of `linear`."""
        quantized, scale = to_int8(linear.weight.detach().float())
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(quantized, scale, bias, is_dynamic=is_dynamic)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in] to [..., out], in the dtype of `x`."""
        if not self.is_dynamic:
            weight = self.weight.to(x.dtype) * self.weight_scale.to(x.dtype)
            return functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))
        rows, scale = to_int8(x.detach().reshape(-1, x.shape[-1]).float())
        product = int8_product(rows, self.weight).float() * scale * self.weight_scale.squeeze(1)
        if self.bias is not None:
            product = product + self.bias
        return product.to(x.dtype).view(*x.shape[:-1], -1)


class Nf4Linear(PackedLinear):
    """A frozen linear layer in 4-bit NormalFloats (Dettmers et al., QLoRA, arXiv:2305.14314), by bitsandbytes' kernels.

    Equal weights give equal bits on every device and rank. `packed`, uint8 [out * in / 2, 1], is a parameter, so that
    it is sharded and moved as others are; `absmax` has the scale of each block of 64 weights in fp32. It is not
    bitsandbytes' `Linear4bit`, which repacks its weights in place in evaluations on some processors.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from bitsandbytes.functional import quantize_4bit

        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed, state = quantize_4bit(linear.weight.detach().float().contiguous(), blocksize=BLOCK, quant_type=NF4)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("absmax", state.absmax)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def _state(self) -> Any:
        from bitsandbytes.functional import QuantState

        shape = torch.Size((self.out_features, self.in_features))
        return QuantState(absmax=self.absmax, shape=shape, blocksize=BLOCK, quant_type=NF4, dtype=torch.float32)  # type: ignore[no-untyped-call]

    @property
    def weight(self) -> Tensor:
        """The values of the weights, [out, in] in fp32."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.packed, self._state())

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in] to [..., out]; the backward reads the 4 bits again instead of keeping their values."""
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]

        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return matmul_4bit(x, self.packed, quant_state=self._state(), bias=bias)  # type: ignore[no-any-return]

    def dequantized(self) -> nn.Linear:
        """Returns a plain layer of the values that the bits stand for."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight, linear.bias = nn.Parameter(self.weight), self.bias
        return linear


def quantize_base(model: nn.Module, adapter: Adapter) -> nn.Module:
    """Stores the linear layers of the repeated layers in 4 bits, in place, except those that the adapter trains whole.

    Raises ValueError where there are none, or where bitsandbytes is not installed.
    """
    require_extra("quantization", feature="quantize_base")
    whole = tuple(adapter.modules_to_save)
    for layer in layer_names(model):
        for name, module in list(model.get_submodule(layer).named_modules(prefix=layer)):
            if type(module) is nn.Linear and not any(part in whole for part in name.split(".")):
                model.set_submodule(name, Nf4Linear(module))
    if not any(isinstance(module, Nf4Linear) for module in model.modules()):
        raise ValueError(
            f"quantize_base: {type(model).__name__} has no linear layers (torch.nn.Linear) in repeated layers. "
            "To fix: leave quantize_base out"
        )
    return model


INT4_WEIGHTS = "weight-only-int4"


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


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (int8 [n, m], scale [n, 1]) whose product is nearest to `rows` [n, m]; rows of zeros have scale 1."""
    scale = rows.abs().amax(1, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (rows / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns A b^T of int8 [n, k] and [m, k], in int32 [n, m]."""
    if a.device.type == "cpu":
        return int_mm(a, b.T)
    num_rows, (num_columns, width) = len(a), b.shape
    more_rows = max(FEWEST_ROWS - num_rows, 0)
    a = functional.pad(a, (0, -width % MULTIPLE, 0, more_rows))
    b = functional.pad(b, (0, -width % MULTIPLE, 0, -num_columns % MULTIPLE))
    return int_mm(a, b.T)[:num_rows, :num_columns]


DYNAMIC = "dynamic-int8"


def quantize(model: nn.Module, adaptation: AdaptationSpec) -> tuple[str, ...]:
    """Quantizes linear layers to 8 bits, in place; returns their names.

    An output head that shares its weight with the embedding stays as it is. Raises ValueError where the model has no
    linear layer.
    """
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m.weight) not in shared]
    if not names or "" in names:
        raise ValueError(
            "quantization: the model has no linear layers (torch.nn.Linear) inside. "
            "To fix: quantize a model that has some"
        )
    _replace(model, names, lambda linear: Int8Linear.of(linear, is_dynamic=adaptation.method == DYNAMIC))
    return tuple(names)


def is_quantized(model: nn.Module) -> bool:
    """Returns whether a model has 8-bit layers."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def check_trainable(model: nn.Module) -> None:
    """Raises ValueError for a model with 8-bit layers."""
    if is_quantized(model):
        raise ValueError(
            "the model is quantized, and a quantized model is not trained further. "
            "To fix: train what it was quantized from, and quantize the result"
        )


def load_quantized(model: nn.Module, folder: Path, quantization: Mapping[str, Any]) -> nn.Module:
    """Fills a fresh, plain `model` with the quantized weights in `folder`.

    quantization: the result of `quantization_of(folder)`.
    Raises ValueError where the weights do not match the model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    remedy = f"To fix: give the model that the one in {folder} was quantized from"
    try:
        _replace(
            model,
            quantization["modules"],
            lambda linear: Int8Linear.of(linear, is_dynamic=quantization["method"] == DYNAMIC),
        )
        missing, unexpected = load_model(model, folder / WEIGHTS, strict=False)
    except (AttributeError, OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model: the quantized weights in {folder} do not fit: {error}. {remedy}") from error
    if wrong := sorted([*missing, *unexpected]):
        raise ValueError(f"model: the quantized weights in {folder} do not fit: {', '.join(wrong[:3])}. {remedy}")
    return model


def compressed_tensors(model: nn.Module, *, method: str) -> dict[str, Any]:
    """Returns the config of compressed-tensors: int8 weights by channel, activations by token."""
    plain = {"num_bits": 8, "type": "int", "symmetric": True}
    activations = {**plain, "strategy": "token", "dynamic": True} if method == DYNAMIC else None
    weights = {**plain, "strategy": "channel", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": [name for name, module in model.named_modules() if isinstance(module, nn.Linear)],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
        },
    }


def _replace(model: nn.Module, names: Iterable[str], made: Any) -> None:
    for name in names:
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise AttributeError(f"{name} is not a linear layer")
        model.set_submodule(name, made(linear))
