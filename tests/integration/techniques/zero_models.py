"""Models that are hard to shard, points to fit, and a checking technique, for the tests of sharded training."""

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import Dataset

from ringmaster.techniques.fsdp import FsdpStatic
from ringmaster.techniques.sharding import buckets
from tests.integration.measuring import OneThread

WIDTH = 64


class Points(Dataset):
    """Points in space with a target each; every eighth one takes the detour."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        self.points = torch.randn(size, WIDTH, generator=draw)
        self.targets = self.points[:, :1].sin()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        detour = torch.tensor(index % 8 == 0)
        return {"points": self.points[index], "targets": self.targets[index], "detour": detour}


def points():
    return Points(128, seed=0), Points(16, seed=1)


def squared_error(output, batch):
    return (output - batch["targets"]).square().sum(), len(output)


class Linear(nn.Module):
    """A model with two parameters: on four ranks, two ranks have nothing to update."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, points, **_):
        return self.head(points)


class Uneven(nn.Module):
    """A model with irregular use of its weights.

    One weight is never used, one is used by some rows only, one is used without a call of its module, one is frozen,
    and one is a scalar.
    """

    def __init__(self):
        super().__init__()
        self.body, self.detour, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.uncalled, self.head, self.frozen = (nn.Linear(WIDTH, 1) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, points, detour, **_):
        hidden = torch.tanh(self.body(points))
        if detour.any():
            hidden = hidden + detour[:, None] * self.detour(hidden)
        hidden = hidden * self.scale
        return self.head(hidden) + nn.functional.linear(hidden, self.uncalled.weight) + self.frozen(points)


def linear():
    return Linear()


def uneven():
    return Uneven()


class SteadyFsdpStatic(FsdpStatic):
    """Fails where a step after the first needs another buffer.

    Gloo's thread drops a collective's buffers some time after its end. A further collective makes it do so before the
    next buffer is taken.
    """

    name = "steady-fsdp-static"

    def mesh_shape(self, gang, config):
        distributed_c10d.ProcessGroupGloo = OneThread  # for the groups that are made next
        return super().mesh_shape(gang, config)

    def parallelize(self, model, mesh, config):
        pools, group = [], mesh.get_group()

        class Known(buckets.BufferPool):
            def __init__(self):
                super().__init__()
                pools.append(self)

            def take(self, *args, **kwargs):
                group.allreduce([torch.empty(0)]).wait()
                return super().take(*args, **kwargs)

        buckets.BufferPool = Known
        self.pools, self.sizes = pools, set()
        return super().parallelize(model, mesh, config)

    def after_step(self, model):
        self.sizes.add(tuple(pool.num_bytes for pool in self.pools))
        if len(self.sizes) > 1 or 0 in min(self.sizes):
            raise AssertionError(f"bytes of the two pools: {self.sizes}")
