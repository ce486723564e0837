"""The list of a model's files and tensors, stored as JSON, and its validated parsing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ringmaster.model_lineage.tensors.folders import name_fault
from ringmaster.model_lineage.tensors.layout import ITEM_BYTES, by_name, num_bytes


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a model. digest: of its bytes; the name of its object in the store."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a model. head: the digest of a safetensors header, or of the whole content of any other file."""

    path: str
    head: str
    tensors: tuple[StoredTensor, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the file's parts, in file order."""
        return (self.head, *(tensor.digest for tensor in self.tensors))


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in the store."""

    id: str
    files: tuple[StoredFile, ...]

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The model's tensors by name; repeated names are prefixed with their file's path."""
        return by_name([(file.path, tensor.name, tensor) for file in self.files for tensor in file.tensors])

    @property
    def weight_bytes(self) -> int:
        """The uncompressed size of the tensors."""
        return sum(math.prod(t.shape) * ITEM_BYTES.get(t.dtype, 1) for t in self.tensors.values())

    @property
    def digests(self) -> set[str]:
        """The objects that the model consists of, without the parents of those stored as differences."""
        return {digest for file in self.files for digest in file.digests}


def files_in(entries: Any) -> tuple[StoredFile, ...]:
    """Parses a list of files. Raises ValueError if it is invalid, or if a path would lead out of the model's folder."""
    if not isinstance(entries, list):
        raise ValueError("it is no list")
    files = tuple(_file(entry) for entry in entries)
    paths = {file.path for file in files}
    folders = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents}
    if len(paths) < len(files) or paths & folders:
        raise ValueError("it names a file twice")
    return files


def _file(entry: Any) -> StoredFile:
    said = _object(entry)
    tensors = said.get("tensors")
    if not isinstance(tensors, list):
        raise ValueError("a file has no list of tensors")
    path = _text(said, "path")
    if fault := name_fault(path):
        raise ValueError(f"it has a file {path!r}, whose name {fault}")
    return StoredFile(path=path, head=_digest(said, "head"), tensors=tuple(_tensor(_object(each)) for each in tensors))


def _tensor(said: Mapping[str, Any]) -> StoredTensor:
    shape = said.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError("a shape is no list of whole numbers")
    name, dtype = _text(said, "name"), _text(said, "dtype")
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), digest=_digest(said, "digest"))


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an entry is no object")
    return value


def _text(said: Mapping[str, Any], key: str) -> str:
    value = said.get(key)
    if not isinstance(value, str):
        raise ValueError(f"a {key} is no text")
    return value


def _digest(said: Mapping[str, Any], key: str) -> str:
    value = _text(said, key)
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"a {key} is no digest")
    return value


def odd_tensors(model: StoredModel) -> Iterator[str]:
    """Yields a message for each tensor with an invalid shape or dtype, which earlier releases stored unchecked."""
    for name, tensor in model.tensors.items():
        if min(tensor.shape, default=0) < 0 or num_bytes(tensor.dtype, tensor.shape) is None:
            yield f"{name} is said to be {list(tensor.shape)} of {tensor.dtype}, which no tensor is"
