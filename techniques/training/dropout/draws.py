"""Random draws of a forward pass: the seed and samples they derive from, and the module that makes them."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ringmaster.techniques.training.dropout.hashing import Keys, kept, key_of, mixed, random_bits

Site = tuple[str, int]
"""A place that draws: the name of the innermost module, and the number of its earlier draws in this pass."""

_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def kind_of(site: Site) -> Site:
    """Returns the site with `*` for layer numbers: layers of the same kind have the same result."""
    return _LAYER_NUMBER.sub("*", site[0]), site[1]


class NoSample(ValueError):
    """Raised for a mask whose first dimension holds no samples, such as tokens that are routed to an expert."""


class Draws:
    """The random draws of one forward pass over one micro-batch.

    seed: the seed of the job and the step.
    samples: the position of each row in the global batch.
    shared: kinds of sites whose tensors hold no samples, so that one mask serves all samples.
    """

    def __init__(self, *, seed: int, samples: Sequence[int], shared: Collection[Site] = ()) -> None:
        self.seed = seed
        self._place: list[str] = [""]
        self._rows = mixed(np.asarray(samples, dtype=np.uint64) ^ key_of(seed))
        self._none = mixed(key_of(seed, "shared").reshape(1))
        self._shared = shared
        self._counts: dict[str, int] = {}

    def resumed(self) -> Draws:
        """Returns a copy that makes the same draws from here on, independent of further draws of the original."""
        copied = object.__new__(Draws)
        copied.__dict__.update(self.__dict__, _place=list(self._place), _counts=dict(self._counts))
        return copied

    def enter(self, module: str) -> None:
        """Begins the forward of the module with this name."""
        self._place.append(module)

    def leave(self) -> None:
        """Ends the forward of the innermost module."""
        self._place.pop()

    def kept(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """Returns a bool tensor of `shape`, False with probability p. Raises NoSample."""
        keys, rest = self._keys(shape)
        return kept(keys, rest, p, device).reshape(shape)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Returns an fp32 tensor of `shape`, uniform in [0, 1). Raises NoSample."""
        keys, rest = self._keys(shape)
        bits = random_bits(keys, rest, device).bitwise_right_shift_(8).bitwise_and_((1 << 24) - 1)
        return bits.reshape(shape).float().mul_(2.0**-24)

    def _keys(self, shape: Sequence[int]) -> tuple[Keys, tuple[int, ...]]:
        """A key for each sample, and the shape of one sample's part of a tensor."""
        site = self._next_site()
        num_samples = len(self._rows)
        if not shape or (self._shared and kind_of(site) in self._shared):
            return mixed(self._none ^ _key_of_site(site)), tuple(shape)
        if shape[0] % num_samples:
            raise NoSample(
                f"dropout in {site[0] or 'the model'} draws for a tensor of shape {list(shape)}, whose first dimension "
                f"does not hold the {num_samples} samples of the batch"
            )
        return mixed(self._rows ^ _key_of_site(site)), (shape[0] // num_samples, *shape[1:])

    def _next_site(self) -> Site:
        place = self._place[-1]
        number = self._counts.get(place, 0)
        self._counts[place] = number + 1
        return place, number


@lru_cache(maxsize=1 << 14)
def _key_of_site(site: Site) -> np.uint64:
    return key_of(*site)


# Not thread-local: autograd recomputes layers in threads of its own.
_current: Draws | None = None


def current() -> Draws | None:
    """Returns the draws of the running forward pass, or None where torch's own generator is used."""
    return _current


def use(draws: Draws | None) -> None:
    """Makes the following forward pass draw from `draws`.

    It also seeds the generators of torch, numpy and Python with the step's seed, because the hash does not replace
    them. So scalars that a model draws from them agree over ranks and micro-batches.
    """
    global _current
    _current = draws
    if draws is not None:
        seed_generators(draws.seed)


def seed_generators(*parts: int) -> None:
    """Seeds the generators of torch, numpy and Python with a hash of these numbers."""
    seed = int(key_of(*parts))
    torch.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


class resumed:
    """Context that draws from a copy of `draws`, for a part of a forward pass that runs at another time than the rest.

    It may be entered several times: some schedules recompute a layer twice.
    """

    def __init__(self, draws: Draws | None) -> None:
        self._draws, self._before = draws and draws.resumed(), list[Draws | None]()

    def __enter__(self) -> None:
        global _current
        self._before.append(_current)
        _current = self._draws and self._draws.resumed()

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before.pop()


def name_modules(model: nn.Module) -> None:
    """Registers hooks by which modules of `model` report their names while they run.

    These are dropouts, and all modules with children. Other draws of a leaf module count as its parent's. Call it once,
    before a technique lays the model out.
    """
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) or any(True for _ in module.children()):
            module.register_forward_pre_hook(partial(_enter, name))
            module.register_forward_hook(_leave, always_call=True)


def _enter(name: str, module: nn.Module, given: Any) -> None:
    if _current is not None:
        _current.enter(name)


def _leave(module: nn.Module, given: Any, output: Any) -> None:
    if _current is not None:
        _current.leave()
