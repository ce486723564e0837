"""The model of a probe's tiny step: of the job's own class and config, as small as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringmaster.techniques.interface.job import ModelSpec
from ringmaster.techniques.runtime.data import PreparedData
from ringmaster.techniques.runtime.models.architectures import instantiate
from ringmaster.techniques.runtime.models.build import build_model, model_config, seeded
from ringmaster.techniques.runtime.probing.tiny import tiny_config

MOST_PARAMETERS = 300_000_000  # limit for layers at their real size, if thin ones cannot be built


def probed_model(spec: ModelSpec, data: PreparedData, *, read: set[str]) -> nn.Module:
    """The model with two thin layers, on the CPU, in fp32 and in training mode; a factory's model at its full size.

    If the class refuses thin layers, two layers of the real size are built.

    read: a set to which the names of the config's fields that the model reads are added, now and later.
    Raises ValueError if neither can be built, and `TooLarge` if the real layers are too large.
    """
    if spec.factory is not None:
        return build_model(spec, data=data, seed=0)
    config = model_config(spec, data)
    with seeded(0):
        try:
            return _made(tiny_config(config), read)
        except ValueError:
            config = tiny_config(config, thin=False)
            _check_size(config)
            return _made(config, read)


class TooLarge(ValueError):
    """Raised for a model that cannot be made small enough for a probe."""


def _made(config: Any, read: set[str]) -> nn.Module:
    _record(config, read)
    config._attn_implementation = "sdpa" if config._attn_implementation in _ON_GPUS else config._attn_implementation
    return instantiate(config).float().train()


_ON_GPUS = ("flash_attention_2", "flex_attention")


def _record(config: Any, read: set[str]) -> None:
    """Adds the name of every attribute that is read from a config to `read`."""
    of_class = type(config)

    class Recorded(of_class):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    Recorded.__name__ = of_class.__name__
    object.__setattr__(config, "__class__", Recorded)


def _check_size(config: Any) -> None:
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in instantiate(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise TooLarge(f"two layers of it have {num_parameters:,} parameters")
