"""The files of a model: a validated listing of an untrusted folder, the parts of safetensors files, the stored list.

A file that is not a plain file of the folder is refused. A link to a file is followed if it stays in the folder.
Hugging Face's cache stores a model in `models--OWNER--NAME`, where `snapshots/REVISION/model.safetensors` is a link to
`../../blobs/...`. In such a snapshot a link may therefore lead anywhere in that model's cache folder, but not out of
it. Links to folders, pipes and devices are refused.
"""

import json
import math
import mmap
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from ringmaster.codec import from_json
from ringmaster.text import join_limited

MAX_FILES = 10_000
MAX_FAULTS = 20
REMEDY = "give a folder with the model's own files alone"


def files_of(folder: Path) -> list[tuple[str, Path]]:
    """Returns (relative name, path of the bytes) of every file in a model's folder, sorted by name.

    Raises ValueError if a file lies outside of the folder, or if its name could be taken for another's.
    """
    root = folder.resolve()
    home = _home_of(root)
    result: list[tuple[str, Path]] = []
    faults: list[str] = []
    for place, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = Path(place, name)
            relative = path.relative_to(root).as_posix()
            if fault := name_fault(relative):
                faults.append(f"{folder} has a file {relative!r}, whose name {fault}. To fix: rename it")
            elif name in names or path.is_symlink():
                try:
                    result.append((relative, _file_at(path, relative, folder, home)))
                except ValueError as error:
                    faults.append(str(error))
        if len(result) + len(faults) > MAX_FILES:
            raise ValueError(f"{folder} has more than {MAX_FILES:,} files. To fix: {REMEDY}")
    if faults:
        raise ValueError(join_limited(faults, between="; ", most=MAX_FAULTS))
    return sorted(result, key=lambda each: Path(each[0]))


def name_fault(name: str) -> str:
    """Returns why a file of a model may not have this relative name, or "" if it may."""
    if any(unicodedata.category(c)[0] == "C" for c in name):  # bytes that are not UTF-8 are decoded as lone surrogates
        return "has control characters, or bytes that are no UTF-8"
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "/".join(parts) != name:
        return "leads out of the folder"
    return ""


def _file_at(path: Path, relative: str, folder: Path, home: Path) -> Path:
    """Returns the resolved path of a file. Raises ValueError if it is not a file, or leads out of `home`."""
    try:
        real = path.resolve(strict=True)
        kind = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise ValueError(
            f"{folder}: {relative} is a link that leads nowhere. To fix: remove it, or {REMEDY}"
        ) from error
    if not real.is_relative_to(home):
        raise ValueError(f"{folder}: {relative} is a link to {real}, outside of the model. To fix: {REMEDY}")
    if not stat.S_ISREG(kind):
        what = "a link to a folder" if stat.S_ISDIR(kind) else "a pipe, a socket or a device"
        raise ValueError(f"{folder}: {relative} is {what}, and no file. To fix: remove it, or {REMEDY}")
    return real


def _home_of(root: Path) -> Path:
    """Returns the folder that links must not leave: the model's own, or its whole folder in Hugging Face's cache."""
    for above in root.parents:
        if above.name.startswith("models--") and root.relative_to(above).parts[0] == "snapshots":
            return above
    return root


T = TypeVar("T")

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
MAX_DIMENSIONS = 64  # of a tensor; the limit of torch
DEEPEST_NAME = 100  # the deepest nesting of modules, counted as the dots of a parameter's name


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
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
class MappedTensorFile:
    """A memory-mapped file: the bytes of its header, and the tensors in byte order, which fill the rest of the file."""

    content: memoryview
    header: memoryview
    tensors: tuple[TensorEntry, ...]

    def bytes_of(self, tensor: TensorEntry) -> memoryview:
        """Returns the bytes of a tensor."""
        return self.content[tensor.start : tensor.end]

    @property
    def parts(self) -> list[memoryview]:
        """The bytes of the header and of each tensor."""
        return [self.header, *map(self.bytes_of, self.tensors)]


def read_layout(path: Path, *, named: str | None = None) -> MappedTensorFile:
    """Returns the layout of a safetensors file. Raises ValueError if the file is truncated or not safetensors.

    named: the file's name in messages, if its bytes are stored under another name.
    """
    content = map_file(path)
    try:
        with safe_open(path, framework="np"):  # the library checks types, shapes, and that tensors fill the file
            body = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8:body]), object_pairs_hook=_each_once)
        tensors = [_tensor_entry(name, entry, body) for name, entry in header.items() if name != "__metadata__"]
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{named or path} is not a whole safetensors file: {error}. To fix: fetch or save the file again"
        ) from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    return MappedTensorFile(content=content, header=content[:body], tensors=tuple(tensors))


def plain_layout(path: Path) -> MappedTensorFile:
    """Returns the layout of a file that is not safetensors: all of it is the header."""
    content = map_file(path)
    return MappedTensorFile(content=content, header=content, tensors=())


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


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError on duplicate keys: two tensors of one name would be ambiguous."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("it names something twice")
    return result


def _tensor_entry(name: str, entry: Any, body: int) -> TensorEntry:
    """Returns a tensor by its entry in a header that the library has checked."""
    if not name.isprintable() or name.count(".") > DEEPEST_NAME:
        raise ValueError(f"{name[:80]!r} is not a parameter's name")
    if len(entry["shape"]) > MAX_DIMENSIONS:
        raise ValueError(f"{name} has {len(entry['shape'])} dimensions")
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return TensorEntry(name=name, dtype=entry["dtype"], shape=shape, start=body + first, end=body + last)


@dataclass(frozen=True, kw_only=True)
class ModelTensor:
    """A tensor of a model. digest: of its bytes; the name of its object in the store."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def num_bytes(self) -> int:
        """The uncompressed size."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A file of a model. head: the digest of a safetensors header, or of the whole content of any other file."""

    path: str
    head: str
    tensors: tuple[ModelTensor, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the file's parts, in file order."""
        return (self.head, *(tensor.digest for tensor in self.tensors))


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in the store."""

    id: str
    files: tuple[ModelFile, ...]

    @property
    def tensors(self) -> dict[str, ModelTensor]:
        """The model's tensors by name; repeated names are prefixed with their file's path."""
        return by_name([(file.path, tensor.name, tensor) for file in self.files for tensor in file.tensors])

    @property
    def weight_bytes(self) -> int:
        """The uncompressed size of the tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def digests(self) -> set[str]:
        """The objects that the model consists of, without the parents of those stored as differences."""
        return {digest for file in self.files for digest in file.digests}


def files_in(entries: Any) -> tuple[ModelFile, ...]:
    """Parses a list of files. Raises ValueError if it is invalid, or if a path would lead out of the model's folder."""
    if not isinstance(entries, list):
        raise ValueError("it is not a list")
    files = tuple(from_json(ModelFile, entry) for entry in entries)
    for file in files:
        names = [file.path, *(name for tensor in file.tensors for name in (tensor.name, tensor.dtype))]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a path, a name or a dtype is not text")
        if fault := name_fault(file.path):
            raise ValueError(f"it has a file {file.path!r}, whose name {fault}")
        if not all(isinstance(each, str) and re.fullmatch("[0-9a-f]{64}", each) for each in file.digests):
            raise ValueError("a head or a digest is not a SHA-256")
        if not all(type(size) is int for tensor in file.tensors for size in tensor.shape):
            raise ValueError("a shape is not a list of whole numbers")
    paths = {file.path for file in files}
    folders = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents}
    if len(paths) < len(files) or paths & folders:
        raise ValueError("it names a file twice")
    return files
