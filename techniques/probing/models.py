"""The model of a probe's tiny step: of the job's own class and config, as small as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringmaster.errors import ModelTooLarge
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.job import ModelSpec
from ringmaster.techniques.models.architectures import instantiate
from ringmaster.techniques.models.build import build_model, model_config, seeded
from ringmaster.techniques.probing.tiny import tiny_config

MOST_PARAMETERS = 500_000_000  # and buffers, of the small model


def probed_model(spec: ModelSpec, data: PreparedData, *, read: set[str]) -> nn.Module:
    """The model with two thin layers, on the CPU, in fp32 and in training mode; a factory's model at its full size.

    If the class refuses thin layers, two layers of the real size are built.

    read: a set to which the names of the config's fields that the model reads are added, now and later.
    Raises ValueError if neither can be built, and `ModelTooLarge` if even the small model would be too large.
    """
    if spec.factory is not None:
        return build_model(spec, data=data, seed=0)
    config = model_config(spec, data)
    with seeded(0):
        try:
            return _made(tiny_config(config), read)
        except ModelTooLarge:
            raise
        except ValueError:
            return _made(tiny_config(config, thin=False), read)


def _made(config: Any, read: set[str]) -> nn.Module:
    _check_size(config)
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
        model = instantiate(config)
    sizes = {name: tensor.numel() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if sum(sizes.values()) > MOST_PARAMETERS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ModelTooLarge(
            f"model: two thin layers of it have {sum(sizes.values()):,} numbers, {sizes[largest]:,} of them in "
            f"{largest}; a tiny step takes at most {MOST_PARAMETERS:,}. To fix: lower the sizes in model.config"
        )
