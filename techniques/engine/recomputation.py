"""Activation checkpointing: layers whose activations are recomputed in backward instead of kept.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174).
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from techniques.engine.models import layer_names


def recompute_layers(model: nn.Module, mode: str) -> None:
    """Makes each repeated layer of `model` recompute its activations where `mode` is "full"; "none" leaves it.

    A layer's `forward` is replaced rather than the layer wrapped, so that parameters keep their names. The random
    numbers of the first forward are drawn again in the recomputation.
    """
    if mode == "none":
        return
    if mode != "full":
        raise ValueError(f"recompute {mode!r} is unknown: there are none, full")
    for name in layer_names(model):
        layer = model.get_submodule(name)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
