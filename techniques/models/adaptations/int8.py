"""Linear layers with 8-bit weights.

With a weight W [out, in], a scale s_i = max_j |W_ij| / 127 for each output channel and Q = round(W / s) in int8:

    weight-only    y = x (s Q)^T + b                  saves memory; the product is computed in floating point
    dynamic        y = t s (P Q^T) + b, x ~ t P       rows of x in int8 too, with their own scales t; an integer product

Sources: Jacob et al. (arXiv:1712.05877), symmetric and without zero points; Dettmers et al., LLM.int8()
(arXiv:2208.07339), vector-wise scales.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

LARGEST = 127
# CUDA's integer product requires more than 16 rows, and widths that are multiples of 8.
FEWEST_ROWS, MULTIPLE = 17, 8


class Int8Linear(nn.Module):
    """A linear layer with `weight` (int8, [out, in]), `weight_scale` (fp32, [out, 1]) and optionally a `bias`.

    All three are buffers, so none of them is trained.
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

    @classmethod
    def like(cls, linear: nn.Linear, *, is_dynamic: bool) -> Int8Linear:
        """Returns a layer of zeros in the shape of `linear`, to be filled."""
        weight = torch.zeros(linear.weight.shape, dtype=torch.int8)
        bias = None if linear.bias is None else torch.zeros(linear.bias.shape)
        return cls(weight, torch.zeros(len(weight), 1), bias, is_dynamic=is_dynamic)

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


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (int8 [n, m], scale [n, 1]) whose product is nearest to `rows` [n, m]; rows of zeros have scale 1."""
    scale = rows.abs().amax(1, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (rows / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns A b^T of int8 [n, k] and [m, k], in int32 [n, m]."""
    if a.device.type == "cpu":
        return torch._int_mm(a, b.T)
    num_rows, (num_columns, width) = len(a), b.shape
    more_rows = max(FEWEST_ROWS - num_rows, 0)
    a = functional.pad(a, (0, -width % MULTIPLE, 0, more_rows))
    b = functional.pad(b, (0, -width % MULTIPLE, 0, -num_columns % MULTIPLE))
    return torch._int_mm(a, b.T)[:num_rows, :num_columns]
