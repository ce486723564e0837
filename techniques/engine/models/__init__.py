"""Models of jobs: built from a config, a pretrained folder or a factory; measured before they exist; exported."""

from techniques.engine.models.architectures import known_architectures
from techniques.engine.models.build import build_model, check_model
from techniques.engine.models.export import export_model
from techniques.engine.models.facts import ModelFacts, layer_names, model_facts

__all__ = [
    "ModelFacts",
    "build_model",
    "check_model",
    "export_model",
    "known_architectures",
    "layer_names",
    "model_facts",
]
