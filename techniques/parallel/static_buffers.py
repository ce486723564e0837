"""Buffers for FSDP2's collectives that are allocated once and reused, each by one owner at a time.

Source: YaFSDP (github.com/yandex/YaFSDP). Its buffers for gathered weights and for gradients are static, so that layers
of varying sizes do not fragment a GPU's memory from step to step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

# torch 2.13 has new names for them; 2.11 has only the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
        work: Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class StaticReduceScatter(ReduceScatter):
    """Reduces gradients from buffers of a pool into others, which hold a layer's gradients until the step."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer: first for a layer's whole gradients, then for the shard of their sum."""
        return self._pool.take(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        """Reduces as FSDP2 does by default, but adds bf16 summands in fp32 and rounds only the sum again."""
        if input_tensor.dtype != torch.float32:
            arrived = self._pool.take(input_tensor.shape, dtype=input_tensor.dtype, device=input_tensor.device)
            dist.all_to_all_single(arrived, input_tensor, group=group)
            total = arrived.view(group.size(), -1).sum(0, dtype=torch.float32)
            output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)
            return None
        work: Work | None = _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        return work


def _is_idle(buffer: Tensor) -> bool:
    """Whether nothing refers to the memory except the buffer itself and the handle that is made to count references."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= IDLE_COUNT


def _idle_count() -> int:
    alone = torch.empty(1)
    count: int = torch._C._storage_Use_Count(alone.untyped_storage()._cdata)
    return count


IDLE_COUNT = _idle_count()
