"""The safetensors format: files written in blocks from one tensor at a time, and remote files read by byte ranges.

A file consists of the length of its header (8 bytes, little-endian), the header in JSON (name -> dtype, shape, first
and last byte in the data that follows), and the tensors' bytes in row-major order. Source:
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

# safetensors' names of the dtypes of training states and quantized weights.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

BLOCK_BYTES = 1 << 22
ALIGNMENT = 8
REMOTE_BLOCK_BYTES, NUM_KEPT_BLOCKS = 1 << 20, 4  # of each file, of which a checkpoint has one a rank

ReadRange = Callable[[int, int], bytes]
"""Returns the bytes of a file from a start up to, but excluding, an end, or the end of the file."""


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is loaded when it is needed."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Its size once it is loaded."""
        return math.prod(self.shape) * self.dtype.itemsize


def blocks_of(
    tensors: Mapping[str, Tensor | LazyTensor], *, metadata: Mapping[str, str] | None = None
) -> Iterator[memoryview]:
    """Yields a safetensors file of `tensors` in blocks of some megabytes; loads one tensor at a time to the CPU."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # large items first: all aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in names:
        tensor = tensors[name]
        num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        offsets = [at, at + num_bytes]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += num_bytes
    value = json.dumps(header, separators=(",", ":")).encode()
    value += b" " * (-len(value) % ALIGNMENT)
    yield memoryview(struct.pack("<Q", len(value)) + value)
    for name in names:
        content = memoryview(bytes_of(tensors[name]))
        for start in range(0, len(content), BLOCK_BYTES):
            yield content[start : start + BLOCK_BYTES]


class DistantFile:
    """A remote safetensors file, of which only requested rows are read.

    It implements those methods of `safe_open` that are used here. Small tensors are read in aligned blocks, which are
    kept for those that are stored next to them: a request for each of thousands of biases and norms would take minutes.
    """

    def __init__(self, read_range: ReadRange, *, block_bytes: int = REMOTE_BLOCK_BYTES) -> None:
        self._read_range, self._block_bytes = read_range, block_bytes
        self._block = lru_cache(maxsize=NUM_KEPT_BLOCKS)(self._read_block)
        (length,) = struct.unpack("<Q", self._read(0, 8))
        self._header: dict[str, Any] = json.loads(self._read(8, 8 + length))
        self._start = 8 + length

    def get_tensor(self, name: str) -> Tensor:
        """Returns a whole tensor."""
        return self.rows(name, slice(None))

    def get_slice(self, name: str) -> DistantTensor:
        """Returns a tensor that can be indexed by slices."""
        return DistantTensor(self, name)

    def rows(self, name: str, rows: slice) -> Tensor:
        """Returns consecutive rows, with the other dimensions whole; a tensor without dimensions is returned whole."""
        stored = self._header[name]
        dtype, shape = DTYPES[stored["dtype"]], stored["shape"]
        first, last = 0, stored["data_offsets"][1] - stored["data_offsets"][0]
        if shape:
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            begin, end, _ = rows.indices(shape[0])
            first, last, shape = begin * row_bytes, end * row_bytes, [end - begin, *shape[1:]]
        if first == last:
            return torch.empty(shape, dtype=dtype)
        at = self._start + stored["data_offsets"][0]
        return torch.frombuffer(bytearray(self._read(at + first, at + last)), dtype=dtype).reshape(shape)

    def _read(self, start: int, end: int) -> bytes:
        if end - start >= self._block_bytes:
            return self._read_range(start, end)
        first, last = start // self._block_bytes, (end - 1) // self._block_bytes
        offset = first * self._block_bytes
        return b"".join(self._block(number) for number in range(first, last + 1))[start - offset : end - offset]

    def _read_block(self, number: int) -> bytes:
        start = number * self._block_bytes
        return self._read_range(start, start + self._block_bytes)


class DistantTensor:
    """A tensor of a `DistantFile`, indexed by one slice for each dimension."""

    def __init__(self, file: DistantFile, name: str) -> None:
        self._file, self._name = file, name

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        return self._file.rows(self._name, slices[0])[(slice(None), *slices[1:])]


def bytes_of(tensor: Tensor | LazyTensor) -> Any:
    """Returns a tensor's bytes in row-major order, as an array."""
    if isinstance(tensor, LazyTensor):
        tensor = tensor.load()
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Returns the digest of the dtypes, shapes and bytes of tensors, in their order."""
    value = sha256()
    for tensor in tensors:
        value.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        value.update(memoryview(bytes_of(tensor)))
    return value.hexdigest()[:32]
