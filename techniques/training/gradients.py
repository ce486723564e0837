"""Norms and scaling of gradients in any layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Layout = tuple[DeviceMesh, tuple[object, ...]]


def global_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Returns the L2 norm of all gradients together: a scalar, equal on every rank of their meshes.

    The squares of the ranks' parts of gradients of one mesh and placement are summed together.
    """
    groups: dict[Layout | None, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[_layout(parameter.grad)].append(local(parameter.grad))
    squares = [_square_over_ranks(layout, gradients) for layout, gradients in groups.items()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def settle_(parameters: Iterable[nn.Parameter]) -> None:
    """Redistributes the gradients of sharded parameters to their parameters' layout; partial gradients are summed."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def scale_(parameters: list[nn.Parameter], factor: float | Tensor) -> None:
    """Multiplies every gradient by `factor` in place."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:  # a rank's share may be empty
        torch._foreach_mul_(gradients, factor)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole tensor, on every rank that holds a part of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_of(values: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's part of a whole tensor that has the shape of `like`, in the layout of `like`; a view."""
    if not isinstance(like, DTensor):
        return values
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return values[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]


def _layout(gradient: Tensor) -> Layout | None:
    return (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None


def _square_over_ranks(layout: Layout | None, gradients: list[Tensor]) -> Tensor:
    square: Tensor = torch.nn.utils.get_total_norm(gradients) ** 2
    if layout is not None:
        mesh, placements = layout
        for axis, placement in enumerate(placements):
            assert not placement.is_partial(), "gradients are settled before their norm is taken"  # type: ignore[attr-defined]
            if not placement.is_replicate():  # type: ignore[attr-defined]
                dist.all_reduce(square, group=mesh.get_group(axis))
    return square
