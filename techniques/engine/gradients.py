"""Norms and scales of gradients, whatever their layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def global_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The L2 norm of all gradients together: a scalar, equal on every rank of the mesh that holds them."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale_(parameters: list[nn.Parameter], factor: float | Tensor) -> None:
    """Multiplies every gradient by `factor` in place."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, factor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
