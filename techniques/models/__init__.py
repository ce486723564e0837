"""Models of jobs: building from a config, a pretrained folder or a factory; facts on the meta device; export.

Importing this package does not import torch, so that checking a batch file stays cheap. The names that need torch are
imported on first access.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.models.architectures import known_architectures

if TYPE_CHECKING:
    from ringmaster.techniques.models.build import build_model, check_model
    from ringmaster.techniques.models.export import export_model
    from ringmaster.techniques.models.facts import model_facts
    from ringmaster.techniques.models.layers import layer_names

__all__ = [
    "build_model",
    "check_model",
    "export_model",
    "known_architectures",
    "layer_names",
    "model_facts",
]

_HOMES = {
    "build_model": "build",
    "check_model": "build",
    "export_model": "export",
    "layer_names": "layers",
    "model_facts": "facts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
