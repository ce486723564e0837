"""Flat buckets of the trained weights, each divided evenly over the ranks, which update one shard each.

Rank r of n has the shard [r B/n, (r+1) B/n) of a bucket of B elements. The part of a parameter in that shard is the
rank's share of the parameter. A shard may begin or end anywhere in a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
class Share:
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
        """Returns the share's elements of a tensor laid out as the shard, shape [length]."""
        return shard[self.start : self.start + self.length]

    def of_parameter(self, values: Tensor) -> Tensor:
        """Returns the share's elements of a tensor of the parameter's shape, shape [length]."""
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
        self.shares = list(self._shares())

    def shard(self, flat: Tensor) -> Tensor:
        """Returns the rank's shard of a tensor laid out as the bucket, shape [shard_size]."""
        return flat[self._first : self._first + self.shard_size]

    def _shares(self) -> Iterator[Share]:
        for slot in self.slots:
            start = max(slot.start, self._first)
            length = min(slot.start + slot.parameter.numel(), self._first + self.shard_size) - start
            if length > 0:
                weight = nn.Parameter(self.weights[start : start + length])
                yield Share(slot, first=start - slot.start, length=length, start=start - self._first, weight=weight)


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
