"""Models of jobs: built from a config, a pretrained folder or a factory; measured before they exist; exported.

Importing this package does not import torch, so that a batch file can be checked without paying for it; its names
that need torch are imported when they are asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.engine.models.architectures import known_architectures

if TYPE_CHECKING:
    from ringmaster.techniques.engine.models.build import build_model, check_model
    from ringmaster.techniques.engine.models.export import export_model
    from ringmaster.techniques.engine.models.facts import ModelFacts, layer_names, model_facts

__all__ = [
    "ModelFacts",
    "build_model",
    "check_model",
    "export_model",
    "known_architectures",
    "layer_names",
    "model_facts",
]

_HOMES = {
    "ModelFacts": "facts",
    "build_model": "build",
    "check_model": "build",
    "export_model": "export",
    "layer_names": "facts",
    "model_facts": "facts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
