"""Merging of several models of one shape into one.

With the parents' weights theta_i and their given factors w_i:

    average            theta = sum_i w_i theta_i / sum_i w_i         (Wortsman et al., Model soups, arXiv:2203.05482)
    task arithmetic    theta = theta_0 + sum_i w_i (theta_i - theta_0)              (Ilharco et al., arXiv:2212.04089)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ringmaster.techniques.interface.job import AdaptationSpec


@torch.no_grad()
def merge(
    base: nn.Module | None, parents: Iterable[nn.Module], said: AdaptationSpec, *, beat: Callable[[], None]
) -> nn.Module:
    """Returns one model merged from the parents, which are read one after another.

    Memory holds two models at a time, and sums in double precision. `base` is the base of task arithmetic. Tensors that
    are not floating-point (counters) are those of the base, or of the first parent.
    """
    weights = said.weights or (1.0,) * len(said.parents)
    is_average = base is None
    scale = 1.0 / sum(weights) if is_average else 1.0
    start = 0.0 if is_average else 1.0 - sum(weights)  # theta_0 (1 - sum w) + sum w theta_i
    result = base
    totals: dict[str, Tensor] = {} if base is None else {k: start * v.double() for k, v in _tensors(base).items()}
    for weight, parent in zip(weights, parents, strict=True):
        result = parent if result is None else result
        for name, tensor in _tensors(parent).items():
            part = tensor.double() * (weight * scale)
            totals[name] = totals[name] + part if name in totals else part
        beat()
    assert result is not None, "nothing to merge"
    for name, tensor in _tensors(result).items():
        tensor.copy_(totals[name])
    return result


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns floating-point parameters and saved buffers, by name; shared tensors occur once."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())
