"""Compilation of a model's repeated layers, each separately: one compilation serves all layers that are alike.

Source: PyTorch's regional compilation, `torch.compile` of repeated layers instead of the whole model.
"""

from __future__ import annotations

import shutil

import torch
from torch import nn

from ringmaster.techniques.models import layer_names


def compile_layers(model: nn.Module, *, device_type: str) -> None:
    """Compiles the forward of each repeated layer, or of the whole model if it has none; called before the layout.

    A layer's `forward` is replaced rather than the layer wrapped, so that parameters keep their names, and the hooks
    that a technique adds to a layer are not compiled. Raises ValueError without the C++ compiler that a CPU needs.
    """
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise ValueError("compile: true needs a C++ compiler on a CPU. To fix: install g++, or leave `compile` out")
    for part in [model.get_submodule(name) for name in layer_names(model)] or [model]:
        part.forward = torch.compile(part.forward, dynamic=False)
