"""Flat buckets of the trained weights, each divided evenly over the ranks, which update one shard each.

Rank r of n has the shard [r B/n, (r+1) B/n) of a bucket of B elements. The part of a parameter in that shard is the
rank's shard of the parameter. A shard may begin or end anywhere in a parameter.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from ringmaster.compat.torch import num_storage_references
from ringmaster.compat.torch_distributed import all_gather, reduce_scatter
from ringmaster.compat.torch_fsdp import AllGather, ReduceScatter
from ringmaster.techniques.training.exact_sums import sum_of_ranks


class BufferPool:
    """Buffers by size, dtype, device and stream; a buffer is idle when nothing else refers to its memory.

    FSDP2 releases a buffer once all its readers are ordered before the next work of the stream that requested it.
    PyTorch's own allocator relies on that, and so does this pool.
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, list[Tensor]] = defaultdict(list)

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers, idle or not."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def take(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an idle buffer of shape `size`; allocates one only where none is idle."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        buffers = self._buffers[math.prod(size), dtype, device, stream]
        for buffer in buffers:
            if _is_idle(buffer):
                return buffer.view(tuple(size))
        buffers.append(torch.empty(math.prod(size), dtype=dtype, device=device))
        return buffers[-1].view(tuple(size))


class StaticAllGather(AllGather):
    """Gathers weights into buffers of a pool, which has as many of a size as are gathered at the same time."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the buffer into which weights are gathered."""
        return self._pool.take(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Gathers as FSDP2 does by default."""
        work: Work | None = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class SummingReduceScatter(ReduceScatter):
    """Reduces gradients as FSDP2 does by default, except where summands would be rounded, or order matters.

    Summands in bf16 are added in fp32, and only the sum is rounded.

    exact: add along the tree of `training.exact_sums`.
    pool: buffers for a layer's gradients, and for their sums until the step; None allocates each time.
    """

    def __init__(self, pool: BufferPool | None, *, exact: bool = False) -> None:
        self._pool, self._exact = pool, exact

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer: first for a layer's whole gradients, then for the shard of their sum."""
        if self._pool is None:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._pool.take(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        """Sends each rank its part, and adds there; or leaves both to the default."""
        if input_tensor.dtype == torch.float32 and not self._exact:
            work: Work | None = reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            return work
        arrived = self.allocate(input_tensor.shape, dtype=input_tensor.dtype, device=input_tensor.device)
        dist.all_to_all_single(arrived, input_tensor, group=group)
        if self._exact:
            output_tensor.copy_(sum_of_ranks(arrived, num_ranks=group.size()))
        else:
            total = arrived.view(group.size(), -1).sum(0, dtype=torch.float32)
            output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)
        return None


def _is_idle(buffer: Tensor) -> bool:
    """Whether nothing refers to the memory except the buffer itself and the handle that is made to count references."""
    return num_storage_references(buffer) <= IDLE_COUNT


IDLE_COUNT = num_storage_references(torch.empty(1))


# Alignment of a parameter's start, in elements: 256 bytes, so that kernels read it as fast as a separate tensor.
ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class BucketRange:
    """The place of a parameter in its bucket: [start, start + parameter.numel())."""

    index: int  # among all trained parameters
    name: str
    parameter: nn.Parameter
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """Returns the parameter's elements of a tensor laid out as the bucket, in the parameter's shape."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """The part of a parameter in this rank's shard: `length` elements of the flattened parameter, from `first` on.

    start: the offset of these elements in the shard.
    weight: these elements of the bucket's weights themselves, for the optimizer to update.
    """

    slot: BucketRange
    first: int
    length: int
    start: int
    weight: nn.Parameter

    def of(self, shard: Tensor) -> Tensor:
        """Returns this part's elements of a tensor laid out as the shard, shape [length]."""
        return shard[self.start : self.start + self.length]

    def of_parameter(self, values: Tensor) -> Tensor:
        """Returns this part's elements of a tensor of the parameter's shape, shape [length]."""
        return values.flatten()[self.first : self.first + self.length]


class Bucket:
    """Parameters that are exchanged together; their storage moves into `weights`, flat, [num_ranks * shard_size]."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], *, first_index: int, rank: int, num_ranks: int
    ) -> None:
        self.slots, end = [], 0
        for i, (name, parameter) in enumerate(named):
            self.slots.append(BucketRange(first_index + i, name, parameter, start=end))
            end += _aligned(parameter.numel())
        self.num_ranks, self.shard_size = num_ranks, _aligned(-(-end // num_ranks))
        self.weights = torch.zeros(num_ranks * self.shard_size, dtype=torch.float32, device=named[0][1].device)
        for slot in self.slots:
            assert slot.parameter.dtype == torch.float32, f"{slot.name} is {slot.parameter.dtype}; jobs train in fp32"
            slot.of(self.weights).copy_(slot.parameter.detach())
            slot.parameter.data = slot.of(self.weights)
        self._first = rank * self.shard_size
        self.parameter_shards = list(self._parameter_shards())

    def shard(self, flat: Tensor) -> Tensor:
        """Returns the rank's shard of a tensor laid out as the bucket, shape [shard_size]."""
        return flat[self._first : self._first + self.shard_size]

    def _parameter_shards(self) -> Iterator[ParameterShard]:
        for slot in self.slots:
            start = max(slot.start, self._first)
            length = min(slot.start + slot.parameter.numel(), self._first + self.shard_size) - start
            if length > 0:
                weight = nn.Parameter(self.weights[start : start + length])
                yield ParameterShard(
                    slot, first=start - slot.start, length=length, start=start - self._first, weight=weight
                )


def divide(model: nn.Module, *, bucket_bytes: int, rank: int, num_ranks: int) -> list[Bucket]:
    """Divides the model's trained parameters into buckets of at most `bucket_bytes` each.

    A larger parameter has its own bucket. The order is the reverse of registration, which is about the order in which
    backward reaches the parameters. A tied parameter appears once.
    """
    groups: list[list[tuple[str, nn.Parameter]]] = [[]]
    filled_bytes = 0
    for name, parameter in reversed([item for item in model.named_parameters() if item[1].requires_grad]):
        if groups[-1] and filled_bytes + parameter.nbytes > bucket_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append((name, parameter))
        filled_bytes += parameter.nbytes
    buckets: list[Bucket] = []
    first_index = 0
    for named in groups:
        buckets.append(Bucket(named, first_index=first_index, rank=rank, num_ranks=num_ranks))
        first_index += len(named)
    return buckets


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT
