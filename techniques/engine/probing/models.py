"""The model of a tiny step: of the job's own class and config, as small as it can be made."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringmaster.techniques.engine.data import PreparedData
from ringmaster.techniques.engine.models.architectures import instantiate
from ringmaster.techniques.engine.models.build import build_model, model_config, seeded
from ringmaster.techniques.engine.probing.tiny import tiny_config
from ringmaster.techniques.job import ModelSpec

MOST_PARAMETERS = 300_000_000  # of layers at their real size, where thinner ones cannot be made


def probed_model(spec: ModelSpec, data: PreparedData, *, read: set[str]) -> nn.Module:
    """The model on the CPU, in fp32 and in training mode: two thin layers of it, or a user's own at its size.

    Where thin layers do not go together two of the real size are taken. read: gets the names of the config's fields
    that the model reads, from now on. Raises ValueError where neither goes together, or they are too large to be tried
    (`TooLarge`).
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
    """A model that cannot be made small enough to be tried."""


def _made(config: Any, read: set[str]) -> nn.Module:
    _record(config, read)
    config._attn_implementation = "sdpa" if config._attn_implementation in _ON_GPUS else config._attn_implementation
    return instantiate(config).float().train()


_ON_GPUS = ("flash_attention_2", "flex_attention")


def _record(config: Any, read: set[str]) -> None:
    """Notes the names of the attributes that are asked of a config."""
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
