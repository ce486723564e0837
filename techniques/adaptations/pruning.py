"""Pruning: the smallest weights of linear and convolution layers become zero, and stay zero while training goes on.

The output head of a language model is left whole, as by convention (Frantar and Alistarh, SparseGPT, arXiv:2301.00774).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ringmaster.techniques.engine.gradients import local
from ringmaster.techniques.job import AdaptationSpec

GROUP, KEPT = 4, 2  # of each 4 neighbouring weights of a row, 2 are kept

LocalMasks = Sequence[tuple[nn.Parameter, Tensor]]
"""The parameters of this rank that were pruned, and of each the part of its mask that is here."""


@torch.no_grad()
def prune(model: nn.Module, said: AdaptationSpec) -> dict[str, Tensor]:
    """Zeroes weights of `model` in place; returns what is kept: a mask (bool, of the weight's shape) by its name.

    magnitude: of each weight the `sparsity` share that is smallest (Han et al., arXiv:1506.02626). 2:4: of each four
    neighbours along a row of a linear layer the two that are largest, which sparse tensor cores skip (Mishra et al.,
    arXiv:2104.08378). Equal weights: the first ones go. Raises ValueError where the model has no layer for it.
    """
    masks = {}
    for name, weight in _prunable(model, is_structured=said.method == "2:4"):
        kept = two_of_four(weight) if said.method == "2:4" else largest(weight, sparsity=said.sparsity)
        weight.mul_(kept)
        masks[name] = kept
    if not masks:
        needed = f"linear layer of a width that {GROUP} divides" if said.method == "2:4" else "linear or convolution"
        raise ValueError(f"pruning by {said.method}: the model has no {needed}. To fix: prune by magnitude, or another")
    return masks


def largest(weight: Tensor, *, sparsity: float) -> Tensor:
    """Which entries to keep: all but the round(sparsity n) of smallest magnitude."""
    order = weight.abs().flatten().argsort(stable=True)
    kept = torch.ones_like(order, dtype=torch.bool)
    kept[order[: round(sparsity * len(order))]] = False
    return kept.view(weight.shape)


def two_of_four(weight: Tensor) -> Tensor:
    """Which entries of [out, in] to keep: of each four neighbours along a row, the two of largest magnitude."""
    groups = weight.abs().reshape(-1, GROUP)
    order = groups.argsort(dim=1, stable=True)
    kept = torch.ones_like(groups, dtype=torch.bool).scatter_(1, order[:, : GROUP - KEPT], False)
    return kept.view(weight.shape)


def is_two_of_four(weight: Tensor) -> bool:
    """Whether no four neighbours along a row have more than two entries that are not zero."""
    return bool(((weight.reshape(-1, GROUP) != 0).sum(1) <= KEPT).all())


def local_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> LocalMasks:
    """The part of each mask that goes with what this rank holds of a parameter, once the model is laid out."""
    return [(p, _part(masks[name], p).to(local(p).device)) for name, p in model.named_parameters() if name in masks]


@torch.no_grad()
def mask_gradients(masks: LocalMasks) -> None:
    """Takes the gradient of pruned weights away: with it an optimizer's moments stay zero there, and so do weights."""
    for parameter, mask in masks:
        if parameter.grad is not None:
            local(parameter.grad).mul_(mask)


def _part(mask: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return mask
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return mask[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]


def _prunable(model: nn.Module, *, is_structured: bool) -> Iterator[tuple[str, Tensor]]:
    ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    ends |= {id(head.weight)} if head is not None else set()
    kinds = (nn.Linear,) if is_structured else (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for name, module in model.named_modules():
        if not isinstance(module, kinds) or id(module.weight) in ends:
            continue
        if not is_structured or module.weight.shape[1] % GROUP == 0:
            yield f"{name}.weight" if name else "weight", module.weight
