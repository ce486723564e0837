"""Norms and scaling of gradients in any layout."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringmaster.compat.torch import foreach_mul_, own_parameters
from ringmaster.compat.torch_distributed import local_region

HALF = torch.bfloat16
# Containers, which have no forward; and batch normalisation, whose kernels take fp32 statistics with bf16 inputs.
LEFT_ALONE = (nn.ParameterList, nn.ParameterDict, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def compute_in_half(model: nn.Module) -> None:
    """Makes every module with parameters of its own compute in bf16; call it after the model is laid out.

    While `forward` runs, rounded weights are set in the module instance's `__dict__`, which Python reads before the
    module's parameters. So nothing is wrapped or renamed. Inputs in fp32 are rounded too.
    """
    for module in model.modules():
        if not any(True for _ in module.parameters(recurse=False)) or isinstance(module, LEFT_ALONE):
            continue
        holders = [module]
        if isinstance(module, nn.MultiheadAttention):  # it reads the weights of a sub-module without calling it
            holders.append(module.out_proj)
        module.register_forward_pre_hook(partial(_round, holders), with_kwargs=True)
        module.register_forward_hook(partial(_restore, holders), always_call=True)


@torch.no_grad()
def round_weights(model: nn.Module, *, but: Collection[str] = ()) -> None:
    """Stores frozen weights in bf16, in the modules that `compute_in_half` makes compute in bf16.

    No optimizer needs their fp32 values. `but` lists names of modules whose weights stay as they are, as other modules
    may share them.
    """
    kept = {id(parameter) for name in but for parameter in model.get_submodule(name).parameters(recurse=False)}
    for module in model.modules():
        if not isinstance(module, LEFT_ALONE):
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point() and id(parameter) not in kept:
                    parameter.data = parameter.data.to(HALF)


def average_in_half(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Communication hook of DDP that averages a bucket of fp32 gradients, each rounded to bf16 for the exchange.

    PyTorch's own hook of that kind supports NCCL only.
    """
    gradients = bucket.buffer()
    rounded = (gradients / group.size()).to(HALF)
    arriving: torch.futures.Future[list[Tensor]] = dist.all_reduce(rounded, group=group, async_op=True).get_future()
    return arriving.then(lambda future: gradients.copy_(future.value()[0]))


def _round(holders: list[nn.Module], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook that rounds the weights of `holders` and the inputs to bf16."""
    for holder in holders:
        for name, parameter in own_parameters(holder).items():
            if parameter is not None and parameter.is_floating_point():
                holder.__dict__[name] = parameter.to(HALF)
    return tuple(map(_rounded, args)), {key: _rounded(value) for key, value in kwargs.items()}


def _restore(holders: list[nn.Module], module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook that removes the rounded weights, even where the forward raised."""
    for holder in holders:
        for name in own_parameters(holder):
            holder.__dict__.pop(name, None)


def _rounded(value: Any) -> Any:
    return value.to(HALF) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


Layout = tuple[DeviceMesh, tuple[object, ...]]


GradientGroups = Sequence[tuple[Sequence[Tensor], Sequence[dist.ProcessGroup]]]
"""Lists of local gradients, each with the groups of ranks that hold other parts."""

ELEMENTS_BITS = 34
"""`exact_norm` is without error for fewer than 2^34 elements."""
BLOCK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements whose squares are added at once; on a CPU they stay in its cache."""


def global_norm(
    parameters: list[nn.Parameter], *, group: dist.ProcessGroup | None = None, exact: bool = False
) -> Tensor:
    """Returns the L2 norm of all gradients together: a scalar, equal on every rank of their meshes.

    The squares of the ranks' parts of gradients of one mesh and placement are summed together.

    group: ranks that hold other parameters, or parts that are no DTensors.
    exact: whether the norm must have the same bits under all layouts.
    """
    by_layout: dict[Layout | None, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_layout[_layout(parameter.grad)].append(local(parameter.grad))
    parts = [(gradients, _shard_groups(layout)) for layout, gradients in by_layout.items()]
    device = parameters[0].device if parameters else torch.device("cpu")
    if exact:
        return exact_norm(parts, group=group, device=device)
    square = torch.zeros((), device=device)
    for gradients, groups in parts:
        square += _summed(torch.nn.utils.get_total_norm(gradients).square(), groups)
    return _summed(square, [] if group is None else [group]).sqrt()


def squared_norm(
    parameters: Sequence[nn.Parameter], *, scaled: Callable[[nn.Parameter], Tensor], device: torch.device
) -> Tensor:
    """Returns the squared L2 norm of all gradients together, as `scaled` returns a rank's part of each of them."""
    squares: dict[Layout | None, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
    for parameter in parameters:
        if parameter.grad is not None:
            squares[_layout(parameter.grad)] += scaled(parameter).float().square().sum()
    return sum(
        (_summed(each, _shard_groups(layout)) for layout, each in squares.items()), torch.zeros((), device=device)
    )


def exact_norm(parts: GradientGroups, *, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Returns the L2 norm of gradients, with the same bits however ranks divide them.

    With 2^e above the largest magnitude and at most 2^n elements, each square is rounded to a multiple of the unit
    u = 2^(2e + n - 53), and what is left to a multiple of 2^(n - 54) u. Sums of 2^n of either are less than 2^53 of
    their unit, so that no addition rounds and their order does not matter.

    Source: Demmel and Nguyen, Fast Reproducible Floating-Point Summation (ARITH 2013).
    """
    held = [gradient for gradients, _ in parts for gradient in gradients if gradient.numel()]
    # The least and the greatest are four times as quick as the norm of the largest magnitude.
    extremes = [extreme for gradient in held for extreme in torch.aminmax(gradient)]
    peak = torch.stack([torch.zeros((), device=device), *extremes]).abs().amax()
    everywhere = [other for _, groups in parts for other in groups] + ([] if group is None else [group])
    for each in dict.fromkeys(everywhere):
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=each)
    largest = float(peak)
    if largest == 0.0 or not math.isfinite(largest):
        return peak
    exponent = 2 * math.frexp(largest)[1]
    # Adding and subtracting 1.5 * 2^52 units rounds to a multiple of the unit.
    high = math.ldexp(1.5, exponent + ELEMENTS_BITS - 1)
    low = math.ldexp(1.5, exponent + 2 * ELEMENTS_BITS - 55)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    buffers = torch.empty(2, BLOCK.get(device.type, 1 << 20), dtype=torch.float64, device=device)
    for gradients, groups in parts:
        sums = torch.zeros_like(total)
        for block in (b for g in gradients for b in torch.split(g.flatten(), buffers.shape[1])):
            square, rounded = buffers[:, : len(block)]
            square.copy_(block).square_()
            torch.add(square, high, out=rounded).sub_(high)
            sums[0] += rounded.sum()
            sums[1] += square.sub_(rounded).add_(low).sub_(low).sum()
        total += _summed(sums, groups)
    return _summed(total, [] if group is None else [group]).sum().sqrt().float()


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
        foreach_mul_(gradients, factor)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole tensor, on every rank that holds a part of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(values: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's part of a whole tensor that has the shape of `like`, in the layout of `like`; a view."""
    if not isinstance(like, DTensor):
        return values
    shape, offset = local_region(like)
    return values[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]


def _layout(gradient: Tensor) -> Layout | None:
    return (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None


def _shard_groups(layout: Layout | None) -> list[dist.ProcessGroup]:
    """Returns the groups of ranks over which gradients of a layout are divided."""
    if layout is None:
        return []
    mesh, placements = layout
    assert not any(p.is_partial() for p in placements), "gradients are settled before"  # type: ignore[attr-defined]
    return [mesh.get_group(axis) for axis, p in enumerate(placements) if not p.is_replicate()]  # type: ignore[attr-defined]


def _summed(values: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Returns sums over the ranks of each group in turn, in place."""
    for group in groups:
        dist.all_reduce(values, group=group)
    return values
