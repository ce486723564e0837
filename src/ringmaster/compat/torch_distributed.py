"""Private and undocumented names of `torch.distributed`, which take a second to import."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = [
    "ColwiseStyle",
    "ModuleStyle",
    "RowwiseStyle",
    "all_gather",
    "all_to_all_single_autograd",
    "dcp_metadata_classes",
    "init_fake_group",
    "local_region",
    "reduce_scatter",
    "replacement_of_tracing",
]

# all_to_all_single_autograd: an exchange of tensors of unequal sizes that autograd follows, and that runs on tensors
# without values. Without it tokens cannot travel to experts on other ranks.

# torch 2.13 has new names for them; 2.11 has only the old ones.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local_region(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and the offset of this rank's part of a distributed tensor.

    No public name has the offset. Without it checkpoints of one layout cannot be read in another one.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


class _LinearStyle:
    """What `ColwiseParallel` and `RowwiseParallel` call for a linear layer and for each module in it, by its name.

    The public styles divide `weight` and `bias` alone. Without it the adapters of divided layers stay whole.
    """

    def divide(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Distributes a module's own parameters; a subclass has it."""
        raise NotImplementedError

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self.divide(name, module, device_mesh)


class ColwiseStyle(_LinearStyle, ColwiseParallel):
    """Divides a linear layer by its outputs, according to `divide`."""


class RowwiseStyle(_LinearStyle, RowwiseParallel):
    """Divides a linear layer by its inputs, according to `divide`."""


class ModuleStyle(ParallelStyle):
    """A style of one's own: `parallelize_module` calls the private method of `ParallelStyle`, as its docstring says.

    Without it keys and values with fewer heads than ranks cannot be shared.
    """

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Returns the module, laid out over the mesh; a subclass has it."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.parallelize(module, device_mesh)


def init_fake_group(*, rank: int, num_ranks: int) -> None:
    """Initializes a process group of ranks that send nothing.

    The module that has the store also registers the backend. Without it no estimate runs the step of one rank alone.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())


def replacement_of_tracing(is_tracing: Callable[[], bool]) -> tuple[ModuleType, str, Callable[[], bool]]:
    """Returns the modules where `is_tracing` replaces what collectives call.

    They take a tensor without values for a tracer's own, and return another kind of result. Without it estimates of
    memory fail under techniques that communicate.
    """
    return collectives, "_are_we_tracing", is_tracing


def dcp_metadata_classes() -> tuple[Any, ...]:
    """Returns the classes in the metadata of torch.distributed.checkpoint that have no public name.

    A safe unpickler allows them by their names. Without them such checkpoints are refused.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    return metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo
