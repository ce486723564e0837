"""What a safetensors file consists of: a header, kept as it is, and the bytes of each tensor."""

from __future__ import annotations

import json
import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

T = TypeVar("T")

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A tensor in a file. start, end: of its bytes, from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one number; 1 for kinds that are not known."""
        return ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mapped file: its header's bytes, and the tensors in the order of their bytes, which fill the rest of it."""

    content: memoryview
    header: memoryview
    tensors: tuple[TensorPart, ...]

    def bytes_of(self, tensor: TensorPart) -> memoryview:
        """The bytes of a tensor."""
        return self.content[tensor.start : tensor.end]


def read_layout(path: Path) -> Layout:
    """The layout of a safetensors file. Raises ValueError where it is cut off or is none."""
    content = map_file(path)
    if len(content) < 8:
        raise ValueError(f"{path} is no safetensors file: it has {len(content)} bytes")
    body = 8 + int.from_bytes(content[:8], "little")
    if body > len(content):
        raise ValueError(f"{path} is cut off: its header alone has {body} bytes, the file {len(content)}")
    try:
        tensors = tuple(sorted(_tensors(json.loads(bytes(content[8:body])), body), key=lambda t: (t.start, t.end)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file: its header cannot be read ({error})") from error
    ends = [body, *(tensor.end for tensor in tensors)]
    if [tensor.start for tensor in tensors] != ends[:-1] or ends[-1] != len(content):
        raise ValueError(f"{path} is damaged: its tensors do not fill it ({ends[-1]} bytes of {len(content)})")
    return Layout(content=content, header=content[:body], tensors=tensors)


def full_name(path: str, name: str) -> str:
    """What a tensor is called in a model that has others of its name: after its file, without the file's ending."""
    return f"{PurePosixPath(path).with_suffix('')}/{name}"


def by_name(tensors: Sequence[tuple[str, str, T]]) -> dict[str, T]:
    """(path of its file, name, tensor) by name, by the full name where several files have one: unet/ and vae/, say."""
    num_files = Counter(name for _, name, _ in tensors)
    return {name if num_files[name] == 1 else full_name(path, name): tensor for path, name, tensor in tensors}


def map_file(path: Path) -> memoryview:
    """A file's bytes, read as they are used."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _tensors(header: dict[str, Any], body: int) -> Iterator[TensorPart]:
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(entry["shape"])
            yield TensorPart(name=name, dtype=entry["dtype"], shape=shape, start=body + first, end=body + last)
