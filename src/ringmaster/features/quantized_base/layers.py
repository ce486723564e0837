"""Linear layers in 4 bits, which the frozen base of an adapter has in place of its own."""

from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.extras import require_extra
from ringmaster.features.quantized_base.job import NF4
from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.models.layers import PackedLinear, layer_names

BLOCK = 64  # weights that share a scale


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
