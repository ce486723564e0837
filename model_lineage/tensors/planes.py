"""Lossless compression of tensors: byte planes, as differences to a parent's tensor, with zstd.

Bytes of equal significance form a byte plane. The signs and exponents of neighbouring weights are similar and compress
well; mantissas are noise and are stored uncompressed. A fine-tuned weight differs little from its parent, so the
exclusive or of the two has zeros where signs, exponents and leading digits agree. ZipNN (Hershcovitch et al., 2024)
measured both effects.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

LEVEL = 1  # of zstd; higher levels gain under 1 % on weights, at a tenth of the speed
NOISE = 0.97  # a plane that compresses to more than this fraction is stored uncompressed, which is faster to read
SAMPLE_BYTES = 1 << 16

RAW, PLAIN, XOR = 0, 1, 2
_HEADER = struct.Struct("<BBHQ")  # arrangement, bytes of an item, unused, total bytes
_PLANE = struct.Struct("<BQ")  # whether compressed, bytes

Bytes = npt.NDArray[np.uint8]

_local = threading.local()  # zstd's contexts must not be shared between threads


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Packed bytes. needs_parent: whether unpacking them needs the parent's bytes."""

    data: bytes
    needs_parent: bool


def pack(content: memoryview, *, item_bytes: int, parent: memoryview | None = None) -> Packed:
    """Packs `content` (items of `item_bytes` each) in its smallest form, alone or as a difference to `parent`."""
    best = _packed(content, PLAIN, item_bytes)
    if parent is not None and len(parent) == len(content) and _is_promising(content, parent, item_bytes):
        best = min(best, _packed(_differing(content, parent), XOR, item_bytes), key=len)
    if len(best) >= len(content) + _HEADER.size:
        return Packed(data=_HEADER.pack(RAW, item_bytes, 0, len(content)) + content, needs_parent=False)
    return Packed(data=best, needs_parent=best[0] == XOR)


def needs_parent(data: memoryview) -> bool:
    """Whether packed bytes are a difference to a parent."""
    return bool(data[0] == XOR)


def unpack(data: memoryview, *, parent: memoryview | None = None) -> memoryview:
    """Returns the unpacked bytes. Raises ValueError if the data are invalid, or if the parent is missing."""
    if len(data) < _HEADER.size:
        raise ValueError("it is cut off in its first bytes")
    arrangement, item_bytes, _, num_bytes = _HEADER.unpack_from(data)
    if item_bytes not in (1, 2, 4, 8):
        raise ValueError(f"it has items of {item_bytes} bytes, which there are not")
    if arrangement == RAW:
        content = data[_HEADER.size :]
    else:
        content = _joined(data[_HEADER.size :], item_bytes=item_bytes, num_bytes=num_bytes)
    if len(content) != num_bytes:
        raise ValueError(f"it holds {len(content)} bytes of {num_bytes}")
    if arrangement in (RAW, PLAIN):
        return content
    if parent is None or len(parent) != num_bytes:
        raise ValueError("it is a difference, and what it differs from is not there")
    return _differing(content, parent)


def _is_promising(content: memoryview, parent: memoryview, item_bytes: int) -> bool:
    """Whether a difference may be smaller, estimated on a sample from the middle to save time."""
    size = SAMPLE_BYTES - SAMPLE_BYTES % item_bytes
    start = max(0, len(content) // 2 - size // 2) // item_bytes * item_bytes
    mine, its = content[start : start + size], parent[start : start + size]
    return len(_packed(_differing(mine, its), XOR, item_bytes)) < len(_packed(mine, PLAIN, item_bytes))


def _packed(content: memoryview, arrangement: int, item_bytes: int) -> bytes:
    parts = [_HEADER.pack(arrangement, item_bytes, 0, len(content))]
    items, rest = divmod(len(content), item_bytes)
    planes = np.frombuffer(content[: items * item_bytes], np.uint8).reshape(items, item_bytes).T
    for plane in [
        *(np.ascontiguousarray(plane) for plane in planes),
        np.frombuffer(content[len(content) - rest :], np.uint8),
    ]:
        parts += _squeezed(plane)
    return b"".join(parts)


def _squeezed(plane: Bytes) -> list[bytes]:
    sample = plane[len(plane) // 2 :][:SAMPLE_BYTES]
    is_noise = len(plane) > SAMPLE_BYTES and len(_compressor().compress(_view(sample))) > NOISE * len(sample)
    squeezed = b"" if is_noise else _compressor().compress(_view(plane))
    if is_noise or len(squeezed) > NOISE * len(plane):
        return [_PLANE.pack(0, len(plane)), plane.tobytes()]
    return [_PLANE.pack(1, len(squeezed)), squeezed]


def _joined(data: memoryview, *, item_bytes: int, num_bytes: int) -> memoryview:
    items, rest = divmod(num_bytes, item_bytes)
    planes: list[Bytes] = []
    at = 0
    for number in range(item_bytes + 1):
        plane, at = _plane(data, at)
        due = items if number < item_bytes else rest
        if len(plane) != due:
            raise ValueError(f"plane {number} has {len(plane)} bytes of {due}")
        planes.append(plane)
    content = _interleaved(planes[:item_bytes])
    return _view(np.concatenate([content, planes[-1]]) if rest else content)


def _interleaved(planes: list[Bytes]) -> Bytes:
    """Joins byte planes, least significant first, into items. There are 1, 2, 4 or 8 planes.

    Each pass joins two planes into one of items twice as wide by shifts, which takes half the time of storing single
    bytes.
    """
    width = 1
    wide: list[npt.NDArray[Any]] = list(planes)
    while len(wide) > 1:
        width *= 2
        joined = []
        for low, high in zip(wide[::2], wide[1::2], strict=True):
            item = high.astype(f"<u{width}")
            item <<= 4 * width
            item |= low
            joined.append(item)
        wide = joined
    return wide[0].view(np.uint8)


def _plane(data: memoryview, at: int) -> tuple[Bytes, int]:
    if at + _PLANE.size > len(data):
        raise ValueError("it is cut off")
    is_squeezed, size = _PLANE.unpack_from(data, at)
    start, end = at + _PLANE.size, at + _PLANE.size + size
    if end > len(data):
        raise ValueError("it is cut off")
    plane = data[start:end]
    if is_squeezed:
        try:
            plane = memoryview(_decompressor().decompress(plane))
        except zstandard.ZstdError as error:
            raise ValueError(f"it cannot be decompressed: {error}") from error
    return np.frombuffer(plane, np.uint8), end


def _differing(content: memoryview, parent: memoryview) -> memoryview:
    return _view(np.bitwise_xor(np.frombuffer(content, np.uint8), np.frombuffer(parent, np.uint8)))


def _view(array: Bytes) -> memoryview:
    return memoryview(array.data)


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
