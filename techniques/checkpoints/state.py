"""Conversion between a job's state in memory, in any layout, and the canonical checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringmaster.compat.torch import persistent_buffers
from ringmaster.compat.torch_distributed import local_region
from ringmaster.errors import CheckpointError
from ringmaster.techniques.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointTensor,
    RankPieces,
    TensorPiece,
    WritePieces,
)
from ringmaster.techniques.checkpoints.storage import UrlStorage
from ringmaster.techniques.checkpoints.tensor_files import DTYPE_NAMES, DTYPES, DistantFile, blocks_of
from ringmaster.techniques.training.gradients import local

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a part of a tensor."""


def named_state(model: nn.Module, *, only: frozenset[str] | None = None) -> dict[str, Tensor]:
    """Returns the model's tensors under their canonical names; tied parameters once.

    `only` restricts them to parameters of these names. Buffers that the model does not save (rotary frequencies) are
    left out, as they are computed from its config.
    """
    named = {
        f"model/{name}": tensor.detach() for name, tensor in model.named_parameters() if only is None or name in only
    }
    if only is not None:
        return named
    return named | {f"model/{name}": tensor for name, tensor in _saved_buffers(model)}


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's tensors under their canonical names `optimizer/<parameter>/<state>`."""
    return {
        f"optimizer/{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def is_first_replica(tensor: Tensor, *, rank: int) -> bool:
    """Returns whether this rank writes a tensor: rank 0 if it is not sharded, else the first replica of each shard."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())


def piece_writer(own_tensors: Mapping[str, Tensor], *, copies: HostCopies | None = None) -> WritePieces:
    """Returns the writer of this rank's parts of the tensors `own_tensors`, for `CheckpointStore`.

    With `copies`, the parts are copied at once, so that training may continue while they are written. Without it, they
    are read from `own_tensors` one after another while they are written.
    """
    held = {name: tensor for name, tensor in own_tensors.items() if local(tensor).numel()}
    regions = {name: (*_region(tensor), tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    parts = {name: local(tensor) for name, tensor in held.items()}
    if copies is not None:
        parts = copies.take(parts)

    def pieces(file: str) -> RankPieces:
        tensors = {}
        for name, (offset, shape, whole_shape, dtype) in regions.items():
            piece = TensorPiece(file=file, key=name, offset=offset, shape=shape)
            tensors[name] = CheckpointTensor(dtype=DTYPE_NAMES[dtype], shape=whole_shape, pieces=(piece,))
        return RankPieces(tensors=tensors, blocks=blocks_of(parts))

    return pieces


class HostCopies:
    """Copies of a rank's tensors in host memory, in buffers that the next copy reuses.

    is_pinned: use pinned memory, which a GPU copies into at the full speed of its link.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of the tensors, valid until the next call."""
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_pinned)
                self._buffers[name] = buffer
            buffer.copy_(tensor, non_blocking=True)
        if self._is_pinned:
            torch.cuda.synchronize()
        return {name: self._buffers[name] for name in tensors}


def restore_model(reader: Reader, model: nn.Module, *, only: frozenset[str] | None = None) -> None:
    """Fills a model, in its own layout, from a checkpoint written under any other.

    Raises CheckpointError where the checkpoint lacks a tensor or stores it in another shape.
    """
    for name, tensor in named_state(model, only=only).items():
        reader.fill(name, tensor)


def restore_optimizer(reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads the state of those parameters that the optimizer updates."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in updated:
            for key in reader.states_of(name):
                optimizer.state[parameter][key] = reader.state(f"optimizer/{name}/{key}", parameter, optimizer)


def read_whole(checkpoint: Checkpoint, *, prefix: str) -> dict[str, Tensor]:
    """Returns the whole tensors whose names start with `prefix`, on the CPU, by the rest of their names."""
    with Reader(checkpoint) as reader:
        names = [name for name in checkpoint.manifest.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): reader.whole(name) for name in names}


class Reader:
    """Reads regions of stored tensors, from memory-mapped files or by byte ranges of remote files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            if not isinstance(file, DistantFile):
                file.__exit__(None, None, None)

    def states_of(self, parameter: str) -> list[str]:
        """Returns the names of a parameter's stored optimizer tensors, e.g. exp_avg, exp_avg_sq, step."""
        return self.names_under(f"optimizer/{parameter}/")

    def names_under(self, prefix: str) -> list[str]:
        """Returns the rest of the names of the stored tensors whose names begin with `prefix`."""
        return [name.removeprefix(prefix) for name in self._checkpoint.manifest.tensors if name.startswith(prefix)]

    def whole(self, name: str) -> Tensor:
        """Returns a tensor as it was stored, on the CPU."""
        stored = self._stored(name)
        value = torch.zeros(stored.shape, dtype=DTYPES[stored.dtype])
        self._read(stored, ((0,) * len(stored.shape), stored.shape), value)
        return value

    def fill(self, name: str, target: Tensor) -> None:
        """Copies this rank's part of `name` into `target`."""
        stored = self._stored(name)
        if tuple(target.shape) != stored.shape:
            raise CheckpointError(
                f"{self._checkpoint.location}: {name} has shape {list(stored.shape)}, "
                f"the model wants {list(target.shape)}"
            )
        self._read(stored, _region(target), local(target))

    def state(self, name: str, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        """Returns an optimizer's state tensor in the layout of its parameter, or unchanged where its shape differs."""
        stored = self._stored(name)
        dtype = DTYPES[stored.dtype]
        if stored.shape == tuple(parameter.shape):
            target = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            self.fill(name, target)
            return target
        value = self.whole(name)
        # Step counters are on the device only for fused kernels, which read them there.
        return value if value.dim() == 0 and not optimizer.defaults.get("fused") else value.to(parameter.device)

    def _stored(self, name: str) -> CheckpointTensor:
        try:
            return self._checkpoint.manifest.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self._checkpoint.location} holds no {name}: it is of another model") from None

    @torch.no_grad()
    def _read(self, stored: CheckpointTensor, wanted: Region, destination: Tensor) -> None:
        for piece in stored.pieces:
            overlap = _overlap(wanted, (piece.offset, piece.shape))
            if overlap is None:
                continue
            source = self._open(piece.file).get_slice(piece.key)
            inside_piece = _slices(overlap, origin=piece.offset)
            inside_wanted = _slices(overlap, origin=wanted[0])
            values = source[inside_piece] if inside_piece else self._open(piece.file).get_tensor(piece.key)
            destination[inside_wanted].copy_(values)

    def _open(self, name: str) -> Any:
        if name not in self._files:
            place, path = self._checkpoint.place, f"{self._checkpoint.name}/{name}"
            if isinstance(place, UrlStorage):
                self._files[name] = DistantFile(partial(place.read_range, path))
            else:
                self._files[name] = safe_open(place.location(path), framework="pt").__enter__()  # type: ignore[no-untyped-call]
        return self._files[name]


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in persistent_buffers(module):
            yield f"{prefix}.{name}" if prefix else name, buffer


def _region(tensor: Tensor) -> Region:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    shape, offset = local_region(tensor)
    return offset, shape


def _overlap(a: Region, b: Region) -> Region | None:
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = tuple(min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, shape) if all(size > 0 for size in shape) else None


def _slices(region: Region, *, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(at - first, at - first + size) for at, first, size in zip(region[0], origin, region[1], strict=True)
    )
