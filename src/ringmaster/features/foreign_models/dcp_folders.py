"""Checkpoints of torch.distributed.checkpoint (DCP), which torchtitan and Megatron-Core write: read and written.

    FOLDER/.metadata          a pickle: the shape and dtype of each tensor, its chunks, and where their bytes are
           __0_0.distcp ...   a chunk after the other, each as `torch.save` writes it

The pickle of a foreign checkpoint can name any function. It is read by an unpickler that knows the classes of DCP's own
metadata and refuses all else before it is called; chunks are loaded as weights alone. Whether all chunks are there, in
files that are long enough, is checked before one is read.

Source: torch.distributed.checkpoint.metadata, .filesystem.
"""

import collections
import io
import math
import pathlib
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ringmaster.compat.torch import stored_layout
from ringmaster.compat.torch_distributed import dcp_metadata_classes
from ringmaster.techniques.checkpoints.tensor_files import LazyTensor
from ringmaster.text import join_limited

METADATA = ".metadata"
SAVE_AGAIN = "To fix: copy the whole folder again, or save the checkpoint again"
MAX_LISTED = 5
UNREADABLE = (pickle.UnpicklingError, EOFError, OSError, AttributeError, TypeError, ValueError, LookupError)

ALLOWED = {
    (each.__module__, each.__qualname__): each
    for each in (
        *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.TensorProperties),
        *(metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta),
        *(planner.SavePlan, planner.WriteItem, planner.WriteItemType, planner.TensorWriteData),
        *(torch.Size, collections.OrderedDict, pathlib.PosixPath, pathlib.PurePosixPath),
        *(*dcp_metadata_classes(), stored_layout),
    )
}


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata. Raises UnpicklingError at any name that is not part of it, without importing it."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of DCP's metadata, or a dtype of torch."""
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of DCP's metadata") from None


def weights_in_stream(stream: io.BytesIO | str, *, named: str) -> Any:
    """Returns what `torch.save` wrote, as weights alone. Raises ValueError where it is damaged, or would run code."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True, mmap=isinstance(stream, str) or None)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        # Without torch's advice, which is to run code from the file.
        lines = [line for line in str(error).splitlines() if "GLOBAL" in line] or str(error).splitlines() or [""]
        why = lines[0].partition(". Please")[0][:300]
        raise ValueError(f"{named} cannot be read as weights: {why}. {SAVE_AGAIN}") from error


@dataclass(frozen=True, kw_only=True)
class DcpTensor(LazyTensor):
    """A stored tensor. load_row: loads one of its rows, reading the chunks that it is in."""

    load_row: Callable[[int], Tensor]


class DcpFolder:
    """A checkpoint of DCP that was checked.

    tensors: by name, loaded when they are needed. values: the names of what is not a tensor.

    Raises ValueError with all faults: a pickle with other content, a missing or cut file, chunks that do not make up
    their tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, file = folder, folder / METADATA
        try:
            with file.open("rb") as stream:
                content = MetadataUnpickler(stream).load()
            if not isinstance(content, metadata.Metadata):
                raise pickle.UnpicklingError("it is not metadata of a checkpoint")
            self._places: dict[metadata.MetadataIndex, Any] = dict(content.storage_data)
            self.tensors: dict[str, DcpTensor] = {}
            self.values: set[str] = set()
            faults: dict[str, None] = {}  # each file's error is reported once
            for name, stored in content.state_dict_metadata.items():
                if isinstance(stored, metadata.TensorStorageMetadata):
                    faults |= dict.fromkeys(self._faults(name, stored))
                    load = partial(self._load, name, stored)
                    self.tensors[name] = DcpTensor(
                        dtype=stored.properties.dtype, shape=tuple(stored.size), load=load, load_row=load
                    )
                else:
                    self.values.add(name)
        except UNREADABLE as error:
            raise ValueError(f"{file} cannot be read: {error!s:.300}. {SAVE_AGAIN}") from error
        if faults:
            raise ValueError(f"{join_limited([*faults], between='; ', most=MAX_LISTED)}. {SAVE_AGAIN}")

    def value(self, name: str, default: Any = None) -> Any:
        """Returns what is stored under a name, but for tensors. Raises ValueError where that is more than weights."""
        return self._chunk(metadata.MetadataIndex(name)) if name in self.values else default

    def _faults(self, name: str, stored: metadata.TensorStorageMetadata) -> list[str]:
        faults, num_items = [], 0
        for chunk in stored.chunks:
            num_items += math.prod(chunk.sizes)
            ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if min((*chunk.offsets, *chunk.sizes), default=0) < 0 or any(
                end > size for end, size in zip(ends, stored.size, strict=True)
            ):
                faults.append(f"{self.folder / METADATA}: a chunk of {name} is outside of it")
            place = self._places.get(metadata.MetadataIndex(name, chunk.offsets))
            if place is None:
                faults.append(f"{self.folder / METADATA} has no position of a chunk of {name}")
                continue
            file = self.folder / place.relative_path
            if transforms := getattr(place, "transform_descriptors", None):
                faults.append(f"{file} is compressed or encrypted ({', '.join(transforms)})")
            elif not file.resolve().is_relative_to(self.folder.resolve()):
                faults.append(f"{file} is outside of the checkpoint")
            elif not file.is_file():
                faults.append(f"{file} is missing")
            elif place.offset < 0 or file.stat().st_size < place.offset + place.length:
                faults.append(f"{file} is cut: it has {file.stat().st_size} bytes")
            elif place.length < math.prod(chunk.sizes) * stored.properties.dtype.itemsize:
                faults.append(f"{file}: a chunk of {name} has fewer bytes than its shape requires")
        if num_items != math.prod(stored.size):
            faults.append(f"{self.folder / METADATA}: the chunks of {name} are not the whole tensor")
        return faults

    def _load(self, name: str, stored: metadata.TensorStorageMetadata, row: int | None = None) -> Tensor:
        result = torch.empty(stored.size if row is None else stored.size[1:], dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            if row is not None and not chunk.offsets[0] <= row < chunk.offsets[0] + chunk.sizes[0]:
                continue
            part = self._chunk(metadata.MetadataIndex(name, chunk.offsets))
            if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != result.dtype:
                raise ValueError(f"{self.folder}: a chunk of {name} does not match {METADATA}. {SAVE_AGAIN}")
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if row is None:
                result[place] = part
            else:
                result[place[1:]] = part[row - chunk.offsets[0]]
        return result

    def _chunk(self, index: metadata.MetadataIndex) -> Any:
        place = self._places[index]
        file = self.folder / place.relative_path
        with file.open("rb") as stream:
            stream.seek(place.offset)
            return weights_in_stream(io.BytesIO(stream.read(place.length)), named=str(file))


class LazySavePlanner(DefaultSavePlanner):
    """Saves tensors that are loaded one at a time, when their bytes are written.

    by_row: the names of `DcpTensor`s of which each row is a chunk.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor], *, by_row: frozenset[str]) -> None:
        super().__init__()
        self._tensors, self._by_row = tensors, by_row

    def create_local_plan(self) -> planner.SavePlan:
        """Returns what is written, each row of the stacked tensors by itself."""
        plan: planner.SavePlan = super().create_local_plan()
        self.plan = replace(plan, items=[row for item in plan.items for row in self._rows(item)])
        return self.plan

    def _rows(self, item: planner.WriteItem) -> list[planner.WriteItem]:
        data, name = item.tensor_data, item.index.fqn
        if name not in self._by_row or data is None:
            return [item]
        sizes, rest = torch.Size([1, *data.size[1:]]), [0] * (len(data.size) - 1)
        offsets = [torch.Size([row, *rest]) for row in range(data.size[0])]
        return [
            replace(
                item,
                index=metadata.MetadataIndex(name, offset, row),
                type=planner.WriteItemType.SHARD,
                tensor_data=replace(data, chunk=metadata.ChunkStorageMetadata(offsets=offset, sizes=sizes)),
            )
            for row, offset in enumerate(offsets)
        ]

    def resolve_data(self, write_item: planner.WriteItem) -> Any:
        """Returns what is written for an item of the plan."""
        lazy, index = self._tensors.get(write_item.index.fqn), write_item.index
        if lazy is None:
            return super().resolve_data(write_item)
        if index.fqn in self._by_row and isinstance(lazy, DcpTensor) and index.offset is not None:
            return lazy.load_row(index.offset[0]).unsqueeze(0).contiguous()
        return lazy.load().contiguous()


def write_dcp(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    values: Mapping[str, Any],
    *,
    by_row: frozenset[str] = frozenset(),
) -> None:
    """Writes tensors, and values that are none, as one rank saves them with DCP."""
    skeleton = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
    saver = LazySavePlanner(tensors, by_row=by_row)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = filesystem.FileSystemWriter(folder)
        state_dict_saver.save({**skeleton, **values}, storage_writer=writer, planner=saver, no_dist=True)
