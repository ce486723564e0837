"""Content-addressed files: written once, never changed, compressed without loss, and verified at every read.

Tensors are packed as byte planes, which are formed by bytes of equal significance, with zstd. The signs and exponents
of neighbouring weights are similar and compress well; mantissas are noise and are stored uncompressed. A fine-tuned
weight differs little from its parent, so the exclusive or of the two has zeros where signs, exponents and leading
digits agree. ZipNN (Hershcovitch et al., 2024) measured both effects.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from ringmaster.errors import TensorObjectError

DEEPEST = 4  # the longest chain of differences; each link costs another read
_DIGEST_BYTES = 32
_HEAD_BYTES = 4 + 1 + _DIGEST_BYTES
_MAGIC = b"RMT1"
_NOBODY = bytes(_DIGEST_BYTES)


def digest_of(content: memoryview | bytes) -> str:
    """Returns the name of some content: its SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


class Objects:
    """The objects under `root`. Several processes may use them: a file appears complete or not at all."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, content: memoryview, *, item_bytes: int, parent: str | None = None) -> str:
        """Stores content (items of `item_bytes` each), as a difference to the object `parent` if that is smaller.

        Returns the digest. An object that exists is not written again. Raises TensorObjectError if the parent is
        damaged.
        """
        digest = digest_of(content)
        if digest in self:
            return digest
        depth = 0 if parent is None else self.depth(parent) + 1
        is_deep = depth > DEEPEST
        packed = pack(content, item_bytes=item_bytes, parent=None if parent is None or is_deep else self.get(parent))
        self._write(digest, packed, parent=parent, depth=depth)
        return digest

    def get(self, digest: str) -> memoryview:
        """Returns the content of that digest. Raises TensorObjectError if it is missing or damaged.

        A parent needs no verification of its own: if it were damaged, the result would have another digest.
        """
        content = self._unpacked(digest)
        if digest_of(content) != digest:
            parent = self.parent(digest)
            if parent is not None:
                self._needed(parent, digest, self.get)  # raises for the parent if that is the damaged one
            raise TensorObjectError(f"object {digest} is damaged: its content has another digest")
        return content

    def parent(self, digest: str) -> str | None:
        """Returns the object that this one is a difference to, or None."""
        head, data = self._read(digest)
        return head[5:].hex() if needs_parent(data) else None

    def depth(self, digest: str) -> int:
        """Returns the number of objects that must be read before this one."""
        return self._read(digest)[0][4]

    def size(self, digest: str) -> int:
        """Returns the size of the object's file in bytes."""
        return self._path(digest).stat().st_size

    def remove(self, digest: str) -> None:
        """Deletes an object."""
        self._path(digest).unlink(missing_ok=True)

    def __contains__(self, digest: str) -> bool:
        return self._path(digest).exists()

    def __iter__(self) -> Iterator[str]:
        for path in sorted(self.root.glob("??/*")):
            if not path.name.startswith("."):
                yield path.parent.name + path.name

    def _unpacked(self, digest: str) -> memoryview:
        """Returns the content of that digest without verifying it."""
        head, data = self._read(digest)
        parent = self._needed(head[5:].hex(), digest, self._unpacked) if needs_parent(data) else None
        try:
            return unpack(data, parent=parent)
        except ValueError as error:
            raise TensorObjectError(f"object {digest} is damaged: {error}") from error

    def _needed(self, parent: str, digest: str, read: Callable[[str], memoryview]) -> memoryview:
        try:
            return read(parent)
        except TensorObjectError as error:
            raise TensorObjectError(f"object {digest} cannot be read without another one: {error}") from error

    def _path(self, digest: str) -> Path:
        return self.root / digest[:2] / digest[2:]

    def _read(self, digest: str) -> tuple[bytes, memoryview]:
        try:
            with self._path(digest).open("rb") as file:
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise TensorObjectError(f"object {digest} is not in {self.root}") from None
        except ValueError:  # nothing to map
            raise TensorObjectError(f"object {digest} is damaged: it is empty") from None
        head = bytes(mapped[:_HEAD_BYTES])
        if len(mapped) <= _HEAD_BYTES or head[:4] != _MAGIC:
            raise TensorObjectError(f"object {digest} is damaged: it does not begin as objects do")
        return head, mapped[_HEAD_BYTES:]

    def _write(self, digest: str, packed: PackedBytes, *, parent: str | None, depth: int) -> None:
        head = _MAGIC + bytes([depth if packed.needs_parent else 0])
        head += bytes.fromhex(parent) if packed.needs_parent and parent is not None else _NOBODY
        write_once(self._path(digest), head, packed.data)


def write_once(path: Path, *parts: bytes) -> None:
    """Writes a file that is synced before it gets its name; an existing file of that name is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise


LEVEL = 1  # of zstd; higher levels gain under 1 % on weights, at a tenth of the speed
NOISE = 0.97  # a plane that compresses to more than this fraction is stored uncompressed, which is faster to read
SAMPLE_BYTES = 1 << 16

RAW, PLAIN, XOR = 0, 1, 2
_HEADER = struct.Struct("<BBHQ")  # arrangement, bytes of an item, unused, total bytes
_PLANE = struct.Struct("<BQ")  # whether compressed, bytes

Bytes = npt.NDArray[np.uint8]

_local = threading.local()  # zstd's contexts must not be shared between threads


@dataclass(frozen=True, kw_only=True)
class PackedBytes:
    """Packed bytes. needs_parent: whether unpacking them needs the parent's bytes."""

    data: bytes
    needs_parent: bool


def pack(content: memoryview, *, item_bytes: int, parent: memoryview | None = None) -> PackedBytes:
    """Packs `content` (items of `item_bytes` each) in its smallest form, alone or as a difference to `parent`."""
    best = _packed(content, PLAIN, item_bytes)
    if parent is not None and len(parent) == len(content) and _is_promising(content, parent, item_bytes):
        best = min(best, _packed(_differing(content, parent), XOR, item_bytes), key=len)
    if len(best) >= len(content) + _HEADER.size:
        return PackedBytes(data=_HEADER.pack(RAW, item_bytes, 0, len(content)) + content, needs_parent=False)
    return PackedBytes(data=best, needs_parent=best[0] == XOR)


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
