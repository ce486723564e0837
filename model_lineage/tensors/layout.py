"""Parser for safetensors files: the header, stored unchanged, and the bytes of each tensor."""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
ITEM_BITS = {**{dtype: 8 * size for dtype, size in ITEM_BYTES.items()}, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
MOST_DIMENSIONS = 64  # of a tensor; the limit of torch
DEEPEST_NAME = 100  # the deepest nesting of modules, counted as the dots of a parameter's name


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A tensor in a file. start, end: the byte range, counted from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one number; 1 for dtypes that are smaller than a byte."""
        return ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A memory-mapped file: the bytes of its header, and the tensors in byte order, which fill the rest of the file."""

    content: memoryview
    header: memoryview
    tensors: tuple[TensorPart, ...]

    def bytes_of(self, tensor: TensorPart) -> memoryview:
        """Returns the bytes of a tensor."""
        return self.content[tensor.start : tensor.end]


def read_layout(path: Path, *, named: str | None = None) -> Layout:
    """Returns the layout of a safetensors file. Raises ValueError if the file is truncated or not safetensors.

    named: the file's name in messages, if its bytes are stored under another name.
    """
    content, named = map_file(path), named or str(path)
    remedy = "To fix: fetch or save the file again"
    if len(content) < 8:
        raise ValueError(f"{named} is no safetensors file: it has {len(content)} bytes. {remedy}")
    body = 8 + int.from_bytes(content[:8], "little")
    if body - 8 > MOST_HEADER_BYTES:
        raise ValueError(f"{named} is no safetensors file: its header would have {body - 8} bytes. {remedy}")
    if body > len(content):
        raise ValueError(f"{named} is cut off: its header alone has {body} bytes, the file {len(content)}. {remedy}")
    try:
        tensors = tuple(
            sorted(
                _tensors(json.loads(bytes(content[8:body]), object_pairs_hook=_each_once), body),
                key=lambda t: (t.start, t.end),
            )
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{named} is no safetensors file: its header cannot be read ({error}). {remedy}") from error
    ends = [body, *(tensor.end for tensor in tensors)]
    if [tensor.start for tensor in tensors] != ends[:-1] or ends[-1] != len(content):
        raise ValueError(
            f"{named} is damaged: its tensors do not fill it ({ends[-1]} bytes of {len(content)}). {remedy}"
        )
    return Layout(content=content, header=content[:body], tensors=tensors)


def plain_layout(path: Path) -> Layout:
    """Returns the layout of a file that is not safetensors: all of it is the header."""
    content = map_file(path)
    return Layout(content=content, header=content, tensors=())


def full_name(path: str, name: str) -> str:
    """Returns a unique name for a tensor: the path of its file without suffix, and its name."""
    return f"{PurePosixPath(path).with_suffix('')}/{name}"


def by_name(tensors: Sequence[tuple[str, str, T]]) -> dict[str, T]:
    """Maps names to tensors, from (path of the file, name, tensor). A name in several files is prefixed by the path.

    Several files have the same names in, for example, diffusion models (unet/ and vae/).
    """
    num_files = Counter(name for _, name, _ in tensors)
    return {name if num_files[name] == 1 else full_name(path, name): tensor for path, name, tensor in tensors}


def map_file(path: Path) -> memoryview:
    """Returns a memory map of a file."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def num_bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Returns the size of a tensor in bytes; None for an unknown dtype, or if the last byte is incomplete."""
    bits = ITEM_BITS.get(dtype, 0) * math.prod(shape)
    return None if dtype not in ITEM_BITS or bits % 8 else bits // 8


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError on duplicate keys: two tensors of one name would be ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it names something twice")
    return found


def _tensors(header: Any, body: int) -> Iterator[TensorPart]:
    if not isinstance(header, dict):
        raise ValueError("it is no object")
    for name, entry in header.items():
        if name != "__metadata__":
            yield _tensor(name, entry, body)


def _tensor(name: str, entry: Any, body: int) -> TensorPart:
    said: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if not name.isprintable() or name.count(".") > DEEPEST_NAME:
        raise ValueError(f"{name[:80]!r} is no parameter's name")
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise ValueError(f"{name} is of {str(dtype)[:40]!r}, which is no kind of number")
    if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{name} has the shape {str(shape)[:80]}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has the data_offsets {str(offsets)[:80]}")
    first, last = offsets
    if num_bytes(dtype, shape) != last - first:
        raise ValueError(f"{name} has {last - first} bytes, and its shape {shape} of {dtype} takes others")
    return TensorPart(name=name, dtype=dtype, shape=tuple(shape), start=body + first, end=body + last)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
