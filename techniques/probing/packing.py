"""A measurement of whether a model keeps samples apart that are packed into one row.

A model that computes its own positions or masks, or that mixes tokens outside of attention, does not, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ringmaster.techniques.job import DISTILLED, Job
from ringmaster.techniques.loss import class_of
from ringmaster.techniques.models.peft_format import resolved
from ringmaster.techniques.training.losses import logits_of

REMEDY = "To fix: set data.packing to false"
MOST_TOKENS = 12  # of each of two samples


def why_never_packed(job: Job) -> str:
    """Returns why no model of this job keeps packed samples apart, with a remedy; empty if one may."""
    if not job.data.packing:
        return ""
    attention = str(job.model.config.get("attn_implementation", job.model.attention))
    if "flash" in attention:  # transformers looks for packed samples in batches of one row only
        return f"data: packing: attention {attention} does not keep samples apart. {REMEDY}, or take attention: sdpa"
    if job.adapter is not None and resolved(job.adapter).kind == "prefix":
        return f"data: packing: a prefix lies before a row, and not before each of its samples. {REMEDY}"
    loss = class_of(job.loss)
    if job.loss is not None and (loss is None or not loss.per_token):
        said = "a loss of one's own" if loss is None else f"the loss {loss.name}"
        return f"data: packing: {said} reads whole sequences, and several lie in one row. {REMEDY}"
    if job.adaptation is not None and job.adaptation.kind == DISTILLED:
        return f"data: packing: whether the teacher keeps samples apart is not measured. {REMEDY}"
    return ""


@torch.no_grad()
def why_not_apart(model: nn.Module, batch: Mapping[str, Tensor]) -> str:
    """Returns why a model mixes samples of one row, with a remedy; empty if it does not.

    The logits of two samples in one row are compared with those of each alone, without dropout.

    model: it is left in training mode. batch: two samples or more, whose tokens are used.
    """
    model.eval()
    try:
        tokens = batch["input_ids"][:2, :MOST_TOKENS]
        alone = [_logits(model, each.unsqueeze(0), 1) for each in tokens]
        together = _logits(model, tokens.reshape(1, -1), 2).chunk(2, dim=1)
    finally:
        model.train()
    difference = max(float((x - y).abs().max()) for x, y in zip(together, alone, strict=True))
    largest = max(float(x.abs().max()) for x in alone)
    if difference <= torch.finfo(torch.float32).eps ** 0.5 * largest:
        return ""
    return (
        f"data: packing: {type(model).__name__} does not keep samples in one row apart (its outputs differ by "
        f"{difference / largest:.1e} of the largest from those of a sample alone). {REMEDY}"
    )


def _logits(model: nn.Module, tokens: Tensor, num_samples: int) -> Tensor:
    positions = torch.arange(tokens.shape[1] // num_samples).repeat(num_samples).unsqueeze(0)
    logits = logits_of(model(input_ids=tokens, position_ids=positions))
    if logits is None:
        raise ValueError(f"data: packing: {type(model).__name__} returns no logits. {REMEDY}")
    return logits
