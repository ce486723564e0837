"""Activation checkpointing: layers whose activations are recomputed in backward instead of stored; and compilation.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174); Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (arXiv:2205.05198), for the selection of stored activations;
PyTorch's regional compilation, `torch.compile` of repeated layers: one compilation serves all layers that are alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringmaster.compat.torch import ATTENTION_OPERATORS, FUNCTIONAL_COLLECTIVES
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.training.dropout import ResumedDraws, current

# Slow operators, whose outputs "selective" stores: matrix products, attention, and (below) collectives.
DEAR_OPERATORS = ATTENTION_OPERATORS | {"mm", "addmm", "bmm", "baddbmm", "convolution", "grouped_mm"}


def recompute_layers(model: nn.Module, mode: str) -> None:
    """Makes each repeated layer recompute activations: all ("full"), the cheap ones ("selective") or "none".

    A layer's `forward` is replaced rather than the layer wrapped, so that parameters keep their names. The
    recomputation draws the same random numbers as the first forward.
    """
    if mode == "none":
        return
    if mode not in ("selective", "full"):
        raise ValueError(f"recompute {mode!r} is unknown: there are none, selective, full")
    contexts = _selective if mode == "selective" else drawing_again
    for name in layer_names(model):
        layer = model.get_submodule(name)
        layer.forward = partial(_recomputed, layer.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Contexts], *args: Any, **kwargs: Any) -> Any:
    """Runs a layer; where there is no backward, as in evaluation and generation, without preparing for one."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of a layer's forward and of its recomputation."""


def drawing_again() -> Contexts:
    """Returns contexts in which the recomputation draws the same random numbers as the forward."""
    return nullcontext(), ResumedDraws(current())


def _selective() -> Contexts:
    keeping, recomputing = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    drawing = ResumedDraws(current())

    @contextmanager
    def both() -> Iterator[None]:
        with recomputing, drawing:
            yield

    return keeping, both()


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Returns whether an operator's outputs are stored."""
    name = operator.overloadpacket.__name__
    is_dear = name in DEAR_OPERATORS or operator.namespace == FUNCTIONAL_COLLECTIVES
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE


def why_not_compiled(device_type: str) -> str:
    """Returns why layers cannot be compiled for such a device: a CPU needs a C++ compiler. "" where they can be."""
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "compile: true needs a C++ compiler on a CPU. To fix: install g++, or leave `compile` out"
    return ""


def compile_layers(model: nn.Module, *, device_type: str, mode: str = "default") -> Callable[[], None]:
    """Compiles the forward of each repeated layer, or of the whole model if it has none; called after the layout.

    A layer's `forward` is replaced rather than the layer wrapped, so that parameters keep their names, and the hooks
    that a technique adds to a layer are not compiled. Returns a function that undoes it. Raises ValueError where
    `why_not_compiled`.
    """
    if reason := why_not_compiled(device_type):
        raise ValueError(reason)
    parts = [model.get_submodule(name) for name in layer_names(model)] or [model]
    plain = [part.forward for part in parts]
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=False, mode=mode)

    def undo() -> None:
        for part, forward in zip(parts, plain, strict=True):
            part.forward = forward

    return undo
