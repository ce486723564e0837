"""Content-addressed files: written once, never changed, compressed without loss, and verified at every read.

Tensors are packed in blocks of byte planes, which are formed by bytes of equal significance, with zstd's entropy coder.
The signs and exponents of neighbouring weights are similar and compress well; mantissas are noise and are stored
uncompressed. A fine-tuned weight differs little from its parent: their difference as integers, with the sign moved to
the lowest bit, is a small number whose upper planes are almost all zeros. ZipNN (Hershcovitch et al., 2024) measured
both effects.
"""

import hashlib
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ringmaster.errors import TensorObjectError
from ringmaster.files import write_atomically

DEEPEST = 4  # the longest chain of differences; each link costs another read
_DIGEST_BYTES = 32
_HEAD_BYTES = 4 + 1 + _DIGEST_BYTES
Bytes = npt.NDArray[np.uint8]

_MAGIC, _OLD_MAGIC = b"RMT2", b"RMT1"  # the older files are of releases until 0.2
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
        while parent is not None and self.depth(parent) == DEEPEST:
            parent = self.parent(parent)
        parts = pack(content, item_bytes=item_bytes, parent=None if parent is None else self._blocks(parent))
        head = bytes([0]) + _NOBODY
        if parent is not None and needs_parent(parts[0]):
            head = bytes([self.depth(parent) + 1]) + bytes.fromhex(parent)
        write_atomically(self._path(digest), _MAGIC, head, *parts)
        return digest

    def get(self, digest: str) -> memoryview:
        """Returns the content of that digest. Raises TensorObjectError if it is missing or damaged.

        A file has a checksum of its content, which is ten times faster to verify than the digest (`fsck` does). A
        parent needs no verification of its own: if it were damaged, the result would have another checksum.
        """
        head, data = self._read(digest)
        content = np.empty(_HEADER.unpack_from(data)[-1], np.uint8)
        for _ in self._blocks(digest, into=content):
            pass
        if head[:4] == _OLD_MAGIC and digest_of(content.data) != digest:
            raise TensorObjectError(f"object {digest} is damaged: its content has another digest")
        return memoryview(content.data)

    def _blocks(self, digest: str, *, into: Bytes | None = None) -> Iterator[npt.NDArray[Any]]:
        """Yields the content as `unpack` does. Raises TensorObjectError if it is missing or damaged."""
        head, data = self._read(digest)
        parent = self._blocks(head[5:].hex()) if needs_parent(data) else None
        try:
            yield from unpack(data, parent=parent, into=into)
        except TensorObjectError as error:
            raise TensorObjectError(f"object {digest} cannot be read without another one: {error}") from error
        except ValueError as error:
            raise TensorObjectError(f"object {digest} is damaged: {error}") from error

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
        head, data = bytes(mapped[:_HEAD_BYTES]), mapped[_HEAD_BYTES:]
        if len(data) < _HEADER.size or head[:4] not in (_MAGIC, _OLD_MAGIC) or data[1] not in _WORDS:
            raise TensorObjectError(f"object {digest} is damaged: it does not begin as objects do")
        return head, data


NOISE = 0.97  # a plane that compresses to more than this fraction is stored uncompressed, which is faster to read
SAMPLE_BYTES = 1 << 16
BLOCK_BYTES = 1 << 18  # of content; its planes, and those of a parent, stay in the processor's cache

BLOCKS, DIFFERENCES = 3, 5  # arrangements: the content in blocks, or what it differs from its parent
_HEADER = struct.Struct("<BBHQ")  # arrangement, bytes of an item, unused, total bytes
_CHECKSUM_BYTES = 16  # after the header
_PLANE = struct.Struct("<BQ")  # whether compressed, bytes
_WORDS = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
# Added to differences, so that the bytes of small ones are near to 128 or 0, whatever their signs.
_OFFSETS = {size: _WORDS[size].type(0x80808080808080 >> 8 * (8 - size) or 0x80) for size in _WORDS}
# Weights repeat nothing, so that the search for repeats gains nothing: the smallest table, and the entropy coder.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0
)


class ZstdContexts(threading.local):
    """The compressors and the decompressor of a thread: they must not be shared between threads."""

    def __init__(self) -> None:
        self.weights = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.text = zstandard.ZstdCompressor(level=3)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = ZstdContexts()


def pack(content: memoryview, *, item_bytes: int, parent: Iterator[npt.NDArray[Any]] | None = None) -> list[Any]:
    """Packs `content` (whole items of `item_bytes` each), as its difference to `parent` if that seems to be smaller.

    parent: the blocks of content of that size. Returns the parts of the packed bytes, the header first.
    """
    kind, parts = BLOCKS, list[Any]()
    for start, end in _ranges(len(content)):
        block = np.frombuffer(content[start:end], _WORDS[item_bytes])
        other = None if parent is None else next(parent, None)
        if start == 0 and other is not None and _is_promising(block, other):
            kind = DIFFERENCES
        if kind == DIFFERENCES:
            assert other is not None, "a parent has as many blocks"
            block = _difference(block, other)
        for plane in _planes(block):
            parts += _squeezed(plane, item_bytes)
    if kind == DIFFERENCES and parent is not None:
        next(parent, None)  # it is verified at its end
    return [_HEADER.pack(kind, item_bytes, 0, len(content)), xxhash.xxh3_128_digest(content), *parts]


def needs_parent(data: memoryview | bytes) -> bool:
    """Whether packed bytes are a difference to a parent."""
    return data[0] in (DIFFERENCES, XOR)


def unpack(
    data: memoryview, *, parent: Iterator[npt.NDArray[Any]] | None = None, into: Bytes | None = None
) -> Iterator[npt.NDArray[Any]]:
    """Yields the blocks of packed bytes, as items. Raises ValueError if the data are invalid, or the parent is missing.

    into: where the content is written; without it, each block is valid until the next one.
    """
    arrangement, item_bytes, _, num_bytes = _HEADER.unpack_from(data)
    if arrangement not in (BLOCKS, DIFFERENCES):
        older = _unpack_older(data, b"".join(bytes(block) for block in parent or ()))
        if into is not None:
            into[...] = older
        yield from (older[start:end].view(_WORDS[item_bytes]) for start, end in _ranges(num_bytes))
        return
    content = np.empty(min(num_bytes, BLOCK_BYTES), np.uint8) if into is None else into
    at, checksum = _HEADER.size + _CHECKSUM_BYTES, xxhash.xxh3_128()
    for start, end in _ranges(num_bytes):
        block = (content[: end - start] if into is None else content[start:end]).view(_WORDS[item_bytes])
        planes = []
        for _ in range(item_bytes):
            plane, at = _plane(data, at, num_bytes=len(block))
            planes.append(plane)
        _join(planes, into=block)
        if arrangement == DIFFERENCES:
            other = None if parent is None else next(parent, None)
            if other is None or len(other) != len(block):
                raise ValueError("it is a difference, and what it differs from is not there")
            block += other
            block -= _OFFSETS[item_bytes]
        checksum.update(block.data)
        yield block
    if len(data) != at:
        raise ValueError(f"it has {len(data)} bytes of {at}")
    if checksum.digest() != data[_HEADER.size : _HEADER.size + _CHECKSUM_BYTES]:
        raise ValueError("its content has another checksum")


def _ranges(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields where blocks begin and end."""
    for start in range(0, num_bytes, BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, num_bytes)


def _difference(block: npt.NDArray[Any], parent: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the differences of items as integers."""
    apart: npt.NDArray[Any] = block - parent
    apart += _OFFSETS[block.itemsize]
    return apart


def _planes(block: npt.NDArray[Any]) -> Iterator[Bytes]:
    """Yields the byte planes of items, least significant first."""
    for number in range(block.itemsize):
        yield (block >> (8 * number) if number else block).astype(np.uint8)


def _join(planes: Sequence[Bytes], *, into: npt.NDArray[Any]) -> None:
    """Joins byte planes, least significant first, into items."""
    into[...] = planes[-1]
    for plane in planes[-2::-1]:
        into <<= 8
        into |= plane


def _is_promising(block: npt.NDArray[Any], parent: npt.NDArray[Any]) -> bool:
    """Whether a difference is smaller, estimated on a sample from the middle to save time."""
    if len(block) != len(parent):
        return False
    num_items = SAMPLE_BYTES // block.itemsize
    start = max(len(block) - num_items, 0) // 2
    own, theirs = (each[start : start + num_items] for each in (block, parent))
    return _squeezed_bytes(_difference(own, theirs)) < _squeezed_bytes(own)


def _squeezed_bytes(block: npt.NDArray[Any]) -> int:
    return sum(len(part) for plane in _planes(block) for part in _squeezed(plane, block.itemsize))


def _squeezed(plane: Bytes, item_bytes: int) -> list[Any]:
    compressor = _contexts.text if item_bytes == 1 else _contexts.weights
    sample = plane[len(plane) // 2 :][: SAMPLE_BYTES // 4]
    is_noise = len(plane) > SAMPLE_BYTES and len(compressor.compress(sample.data)) > NOISE * len(sample)
    squeezed = b"" if is_noise else compressor.compress(plane.data)
    if is_noise or len(squeezed) > NOISE * len(plane):
        return [_PLANE.pack(0, len(plane)), plane.data]
    return [_PLANE.pack(1, len(squeezed)), squeezed]


def _plane(data: memoryview, at: int, *, num_bytes: int) -> tuple[Bytes, int]:
    """Returns the plane of that size at a position, and where the next one begins. Raises ValueError."""
    if at + _PLANE.size > len(data):
        raise ValueError("it is cut off")
    is_squeezed, size = _PLANE.unpack_from(data, at)
    start, end = at + _PLANE.size, at + _PLANE.size + size
    if end > len(data):
        raise ValueError("it is cut off")
    plane = data[start:end]
    if is_squeezed:
        try:
            plane = memoryview(_contexts.decompressor.decompress(plane, max_output_size=num_bytes))
        except zstandard.ZstdError as error:
            raise ValueError(f"it cannot be decompressed: {error}") from error
    if len(plane) != num_bytes:
        raise ValueError(f"a plane has {len(plane)} bytes of {num_bytes}")
    return np.frombuffer(plane, np.uint8), end


RAW, PLAIN, XOR = 0, 1, 2  # arrangements of releases until 0.2: one plane for all items, and the exclusive or


def _unpack_older(data: memoryview, parent: bytes) -> Bytes:
    """Returns the content of bytes that a release until 0.2 has packed. Raises ValueError if they are invalid."""
    arrangement, item_bytes, _, num_bytes = _HEADER.unpack_from(data)
    if arrangement == RAW:
        if len(data) != _HEADER.size + num_bytes:
            raise ValueError(f"it holds {len(data) - _HEADER.size} bytes of {num_bytes}")
        return np.frombuffer(data[_HEADER.size :], np.uint8)
    items, rest = divmod(num_bytes, item_bytes)
    planes, at = [], _HEADER.size
    for number in range(item_bytes + 1):
        plane, at = _plane(data, at, num_bytes=items if number < item_bytes else rest)
        planes.append(plane)
    content = np.empty(num_bytes, np.uint8)
    _join(planes[:-1], into=content[: items * item_bytes].view(_WORDS[item_bytes]))
    content[num_bytes - rest :] = planes[-1]
    if arrangement == XOR:
        if len(parent) != num_bytes:
            raise ValueError("it is a difference, and what it differs from is not there")
        content ^= np.frombuffer(parent, np.uint8)
    return content
