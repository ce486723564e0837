"""Pruning: the smallest weights of a model become zero."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ringmaster.techniques.job import AdaptationSpec

GROUP, KEPT = 4, 2  # of each 4 neighbouring weights of a row, 2 are kept


@torch.no_grad()
def prune(model: nn.Module, adaptation: AdaptationSpec) -> dict[str, Tensor]:
    """Zeroes weights of `model` in place; returns the masks of kept entries (bool, of the weight's shape) by name.

    The method "magnitude" zeroes the `sparsity` share of each weight that is smallest (Han et al., arXiv:1506.02626).
    The method "2:4" keeps the two largest of each four neighbours along a row of a linear layer; sparse tensor cores
    skip the zeros (Mishra et al., arXiv:2104.08378). Of equal weights the first ones are zeroed. Raises ValueError
    where the model has no suitable layer.

    The smallest weights of linear and convolution layers become zero. The output head of a language model is left
    whole, as by convention (Frantar and Alistarh, SparseGPT, arXiv:2301.00774).
    """
    masks, is_structured = {}, adaptation.method == "2:4"
    for name, weight in _prunable(model, is_structured=is_structured):
        kept = two_of_four(weight) if is_structured else largest(weight, sparsity=adaptation.sparsity)
        weight.mul_(kept)
        masks[name] = kept
    if not masks:
        layers = f"linear layer of a width that {GROUP} divides" if is_structured else "linear or convolution"
        raise ValueError(
            f"pruning by {adaptation.method}: the model has no {layers}. To fix: prune by magnitude, or another"
        )
    return masks


def largest(weight: Tensor, *, sparsity: float) -> Tensor:
    """Returns the mask that keeps all but the round(sparsity n) entries of smallest magnitude."""
    order = weight.abs().flatten().argsort(stable=True)
    kept = torch.ones_like(order, dtype=torch.bool)
    kept[order[: round(sparsity * len(order))]] = False
    return kept.view(weight.shape)


def two_of_four(weight: Tensor) -> Tensor:
    """Returns the mask over [out, in] that keeps, of each four neighbours along a row, the two of largest magnitude."""
    groups = weight.abs().reshape(-1, GROUP)
    order = groups.argsort(dim=1, stable=True)
    kept = torch.ones_like(groups, dtype=torch.bool).scatter_(1, order[:, : GROUP - KEPT], False)
    return kept.view(weight.shape)


def is_two_of_four(weight: Tensor) -> bool:
    """Returns whether each four neighbours along a row have at most two nonzero entries."""
    return bool(((weight.reshape(-1, GROUP) != 0).sum(1) <= KEPT).all())


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
