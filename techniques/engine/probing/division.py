"""Whether a batch may be divided: gradients of the whole against those of its parts, for a job's own model and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ringmaster.techniques.engine.dropout import Draws, Sites, drawing, use
from ringmaster.techniques.engine.losses import Loss
from ringmaster.techniques.engine.probing.batches import rows_of

NUM_SAMPLES = 4
WHOLE = ((0, 1, 2, 3),)
DIVISIONS = (((0, 1), (2, 3)), ((3,), (0, 2), (1,)))
# Of the largest gradient, in fp32. Rounding stays below a tenth of it; of losses and layers that look across samples,
# the least that was measured (routers of mixture models) is ten times as much.
LARGEST_DIFFERENCE = 3e-5


def why_undivided(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], sites: Sites) -> str:
    """Why a batch of this model and loss must stay whole; empty where it may be divided.

    model: in training mode, on the device of `batch`, its modules named; its buffers are as before afterwards. batch:
    four samples. Raises what the model or the loss raises for the whole of them.
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
            return f"a part of a batch cannot be trained by itself ({said[0]})"
        difference = _difference(whole, divided)
        if not difference <= LARGEST_DIFFERENCE:
            _restore(model, buffers)
            return (
                f"dividing a batch changes its gradients (by {difference:.1e} of the largest, measured on four "
                "samples): the loss or a layer looks at several samples together"
            )
    _restore(model, buffers)
    return ""


def _gradients(
    model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], parts: Sequence[Sequence[int]], sites: Sites
) -> list[Tensor]:
    """Of the mean loss over all parts, each of which goes through the model by itself."""
    model.zero_grad(set_to_none=True)
    count = 0.0
    with drawing():
        for part in parts:
            use(Draws(seed=0, samples=part, shared=sites.shared))
            rows = rows_of(batch, part)
            part_sum, part_count = loss(model(**loss.forward_inputs(rows)), rows)
            part_sum.backward()  # type: ignore[no-untyped-call]
            count += float(part_count)
    gradients = [p.grad / count for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def _difference(whole: Sequence[Tensor], divided: Sequence[Tensor]) -> float:
    """The largest difference of any element, relative to the largest gradient."""
    if len(whole) != len(divided):
        return float("inf")
    largest = max((float(gradient.abs().max()) for gradient in whole), default=0.0)
    difference = max((float((a - b).abs().max()) for a, b in zip(whole, divided, strict=True)), default=0.0)
    return difference / largest if largest else difference


def _restore(model: nn.Module, buffers: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
