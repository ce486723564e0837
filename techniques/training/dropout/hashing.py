"""Random bits as a hash of what they belong to: nothing is stored, and the order of draws has no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Keys = NDArray[np.uint64]

# splitmix64 (Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_SPLITMIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
# lowbias32, found by search for small bias: github.com/skeeto/hash-prospector.
_LOWBIAS = (0x7FEB352D, 0x846CA68B - (1 << 32))
# Odd constants, one per dimension: fractional parts of square roots of primes. Further dimensions share the last.
_ODD = tuple(
    constant - (1 << 32) if constant >= 1 << 31 else constant
    for constant in (0x6A09E667, 0xBB67AE85, 0x3C6EF373, 0xA54FF53B, 0x510E527F, 0x9B05688B, 0x1F83D9AB)
)
# Elements that are hashed at once: on a CPU as many as fit into a core's cache.
_CHUNK = {"cpu": 1 << 16}
_LARGEST_CHUNK = 1 << 22


def mixed(values: Keys) -> Keys:
    """Returns splitmix64's output function of each uint64."""
    values = values + _SPLITMIX[0]
    values = (values ^ (values >> np.uint64(30))) * _SPLITMIX[1]
    values = (values ^ (values >> np.uint64(27))) * _SPLITMIX[2]
    found: Keys = values ^ (values >> np.uint64(31))
    return found


def key_of(*parts: int | str) -> np.uint64:
    """Returns a 64-bit hash of these values."""
    return np.uint64(int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little"))


def random_bits(keys: Keys, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns int32 [len(keys), *shape], each value equally likely: the bits of one tensor for each key."""
    found = torch.empty(len(keys), *shape, dtype=torch.int32, device=device)
    for bits, first, last in _chunks(keys, shape, device):
        found[first:last] = bits
    return found


def kept(keys: Keys, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """Returns bool [len(keys), *shape], False with probability p."""
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    found = torch.empty(len(keys), *shape, dtype=torch.bool, device=device)
    for bits, first, last in _chunks(keys, shape, device):
        torch.ge(bits, threshold, out=found[first:last])
    return found


def _chunks(keys: Keys, shape: Sequence[int], device: torch.device) -> Iterator[tuple[Tensor, int, int]]:
    """Bits of consecutive keys, with the index of the first key and the index after the last."""
    halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy()).to(device)
    add, multiply = (half.reshape(-1, *[1] * len(shape)) for half in (halves[:, 0], halves[:, 1] | 1))
    index = _index(shape, device)
    size = _CHUNK.get(device.type, _LARGEST_CHUNK)
    rows = max(1, size // max(1, index.numel()))
    shifted = torch.empty(min(rows, len(keys)), *shape, dtype=torch.int32, device=device)
    for first in range(0, len(keys), rows):
        last = min(first + rows, len(keys))
        bits = torch.addcmul(add[first:last], multiply[first:last], index)
        yield _finalize_(bits, shifted[: last - first]), first, last


def _finalize_(bits: Tensor, shifted: Tensor) -> Tensor:
    """Applies lowbias32 in place, without its last shift, which only affects the low bits.

    Right shifts of int32 repeat the sign bit, so the repeated bits are cleared.
    """
    for shift, factor in zip((16, 15), _LOWBIAS, strict=True):
        torch.bitwise_right_shift(bits, shift, out=shifted)
        shifted &= (1 << (32 - shift)) - 1
        bits ^= shifted
        bits *= factor
    return bits


def _index(shape: Sequence[int], device: torch.device) -> Tensor:
    """The sum over dimensions of index times an odd constant, int32.

    So the value of an element does not depend on the lengths of the dimensions, which padding to the longest sample of
    a micro-batch changes.
    """
    total = torch.zeros([1] * len(shape), dtype=torch.int32, device=device)
    for dimension, length in enumerate(shape):
        along = [1] * len(shape)
        along[dimension] = length
        steps = torch.arange(length, dtype=torch.int32, device=device) * _ODD[min(dimension, len(_ODD) - 1)]
        total = total + steps.reshape(along)
    return total
