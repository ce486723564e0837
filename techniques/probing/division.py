"""A measurement of whether a batch may be divided: compares the gradients of a whole batch with those of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ringmaster.techniques.probing.batches import rows_of
from ringmaster.techniques.training.dropout import Draws, DrawSites, drawing, use
from ringmaster.techniques.training.losses import Loss

NUM_SAMPLES = 4
WHOLE = ((0, 1, 2, 3),)
DIVISIONS = (((0, 1), (2, 3)), ((3,), (0, 2), (1,)))
# Relative to the largest gradient, in fp32. Rounding stays below a tenth of this. The smallest difference measured for
# losses and layers that mix samples (routers of mixture-of-experts models) is ten times this.
LARGEST_DIFFERENCE = 3e-5


def why_undivided(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], sites: DrawSites) -> str:
    """The reason why a batch of this model and loss must not be divided; empty if it may be.

    model: in training mode, on the device of `batch`, with named modules (`name_modules`). Its buffers are restored.
    batch: four samples.
    sites: the model's random draws, as `find_sites` found them.
    Raises what the model or the loss raises for the whole batch.
    """
    if sites.reason:
        return sites.reason
    buffers = [buffer.clone() for buffer in model.buffers()]
    whole = _gradients(model, loss, batch, WHOLE, sites)
    for division in DIVISIONS:
        _restore(model, buffers)
        try:
            divided = _gradients(model, loss, batch, division, sites)
        except (ArithmeticError, IndexError, LookupError, RuntimeError, TypeError, ValueError) as error:
            _restore(model, buffers)
            said = str(error).strip().splitlines() or [type(error).__name__]
            return f"a part of a batch cannot be trained alone ({said[0]})"
        difference = _difference(whole, divided)
        if not difference <= LARGEST_DIFFERENCE:
            _restore(model, buffers)
            return (
                f"dividing a batch changes its gradients (by {difference:.1e} of the largest, measured on four "
                "samples): the loss or a layer depends on several samples together"
            )
    _restore(model, buffers)
    return ""


def _gradients(
    model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], parts: Sequence[Sequence[int]], sites: DrawSites
) -> list[Tensor]:
    """The gradients of the mean loss over all parts. Each part has its own forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = loss.given(loss.totals(batch))
    count = 0.0
    with drawing():
        for part in parts:
            use(Draws(seed=0, samples=loss.sequences(part), shared=sites.shared))
            rows = rows_of(batch, part)
            part_sum, part_count = loss(model(**loss.forward_inputs(rows)), rows)
            part_sum.backward()  # type: ignore[no-untyped-call]
            count += float(part_count)
    gradients = [p.grad / count for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def _difference(whole: Sequence[Tensor], divided: Sequence[Tensor]) -> float:
    """The largest difference of any element, relative to the largest gradient's absolute value."""
    if len(whole) != len(divided):
        return float("inf")
    largest = max((float(gradient.abs().max()) for gradient in whole), default=0.0)
    difference = max((float((a - b).abs().max()) for a, b in zip(whole, divided, strict=True)), default=0.0)
    return difference / largest if largest else difference


def _restore(model: nn.Module, buffers: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
