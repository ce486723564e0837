"""Compiling a model's repeated layers, each by itself: one compilation serves all that are alike.

Source: PyTorch's regional compilation, `torch.compile` of what repeats instead of the whole model.
"""

from __future__ import annotations

import shutil

import torch
from torch import nn

from ringmaster.techniques.engine.models import layer_names


def compile_layers(model: nn.Module, *, device_type: str) -> None:
    """Compiles the forward of each repeated layer, or of a model without any as a whole; before it is laid out.

    A layer's `forward` is replaced rather than the layer wrapped, so that parameters keep their names and what a
    technique hooks to a layer stays outside. Raises ValueError without the C++ compiler that a CPU needs.
    """
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise ValueError("compile: true needs a C++ compiler on a CPU. To fix: install g++, or leave `compile` out")
    for part in [model.get_submodule(name) for name in layer_names(model)] or [model]:
        part.forward = torch.compile(part.forward, dynamic=False)
