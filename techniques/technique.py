"""What a parallelism has to say about itself: the `Technique` interface.

A data-parallel technique is about fifteen lines: a name, what it needs, its configs, and `parallelize`. The harness
(`techniques.engine`) owns the loop, the data, timing, checkpoints, signals and metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from techniques.job import Job

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from techniques.engine.models import ModelFacts

Config = Mapping[str, Any]

# fp32 weights and gradients, and what the optimizer keeps for each weight.
WEIGHT_BYTES, GRADIENT_BYTES = 4, 4
OPTIMIZER_STATE_BYTES = {"adamw": 8, "sgd": 4}


@dataclass(frozen=True, kw_only=True)
class GangShape:
    """What a technique may know of the devices before they are chosen.

    kind: "cpu" (a slot of cores) or "gpu". memory_bytes: of one device.
    """

    kind: str
    num_devices: int
    memory_bytes: int
    num_nodes: int = 1


class Technique(ABC):
    """A way to train one job on a gang without changing what is trained.

    Class attributes: `name`; `summary`, one line for people; `needs`, what a job and a gang must have.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    # Whether `parallelize` brings the model to the device itself, layer by layer; else it is there whole before.
    moves_model: ClassVar[bool] = False

    @abstractmethod
    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """None, or in words why this job cannot be trained so on such a gang."""

    @abstractmethod
    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """The search space, the cheapest-looking config first; none of them changes the trained weights."""

    @abstractmethod
    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """The model, laid out over the mesh (None for a single process). Parameters keep their names."""

    def num_ranks(self, gang: GangShape) -> int:
        """Worker processes of a gang; one a device unless the technique says otherwise."""
        return gang.num_devices

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Axes of the device mesh and their sizes: dp_replicate, dp_shard, tp, cp, pp, outermost first."""
        return {"dp_replicate": self.num_ranks(gang)}

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Bytes per device that this config needs at the least: an option above the device's memory is dropped."""
        return training_state_bytes(job, facts)

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around one micro-batch's forward and backward: where gradients are not exchanged until `is_last`."""
        return nullcontext()

    def gradient_divisor(self, mesh: DeviceMesh | None) -> int:
        """By how much the exchange divides the sum of the ranks' gradients (collectives that average: their size)."""
        return data_parallel_size(mesh)

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The global L2 norm of the gradient, a scalar equal on every rank."""
        from techniques.engine.gradients import global_norm

        return global_norm(parameters)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module whose parameters bear the names of the model that was given to `parallelize`."""
        return model


def training_state_bytes(job: Job, facts: ModelFacts) -> int:
    """Bytes of weights, gradients and optimizer state of a whole model (ZeRO, arXiv:1910.02054, section 3.1)."""
    per_weight = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_STATE_BYTES[job.optimizer.name]
    return facts.num_parameters * per_weight


def data_parallel_axes(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """The mesh's axes over which the global batch is divided."""
    names = mesh.mesh_dim_names if mesh is not None else None
    return tuple(name for name in names or () if name.startswith("dp"))


def data_parallel_size(mesh: DeviceMesh | None) -> int:
    """Into how many slices the global batch is divided."""
    size = 1
    for axis in data_parallel_axes(mesh):
        assert mesh is not None
        size *= mesh[axis].size()
    return size


def data_parallel_rank(mesh: DeviceMesh | None) -> int:
    """Which slice of the global batch is this rank's."""
    rank = 0
    for axis in data_parallel_axes(mesh):
        assert mesh is not None
        rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)
    return rank


def batch_is_divisible(job: Job, num_slices: int) -> str | None:
    """Why a global batch cannot be divided over `num_slices`, or None."""
    if job.global_batch_size % num_slices:
        return f"global_batch_size {job.global_batch_size} is not a multiple of {num_slices} devices"
    return None


def undivided_batch_only(job: Job, facts: ModelFacts) -> str | None:
    """Why this job's batch must not be divided at all, or None."""
    if facts.has_batch_statistics:
        return "the model normalises by batch statistics, which change as soon as the batch is divided"
    if job.exact and facts.has_dropout:
        return "exact: true on a model with dropout, which draws anew in another layout"
    return None


def micro_batches(rows: int, *, at_most: int = 3) -> list[int]:
    """Rows of a forward pass to try, largest first: all of a rank's rows, a half, a quarter."""
    sizes = [rows]
    while len(sizes) < at_most and sizes[-1] % 2 == 0 and sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes
