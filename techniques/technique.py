"""What a parallelism has to say about itself: the `Technique` interface.

A data-parallel technique is about fifteen lines: a name, what it needs, its configs, and `parallelize`. The harness
(`ringmaster.techniques.engine`) owns the loop, the data, timing, checkpoints, signals and metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ringmaster.techniques.job import Job

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.engine.models import ModelFacts
    from ringmaster.techniques.engine.state import Reader

Config = Mapping[str, Any]

# Which activations a layer computes again in backward, the quickest first: see `engine.recomputation`.
RECOMPUTE = ("none", "selective", "full")

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


class StepWork(Protocol):
    """One rank's share of a global step, as the harness hands it to `Technique.forward_backward`."""

    @property
    def num_micro_batches(self) -> int:
        """Forward passes that the share is divided into; at least one."""

    def batch(self, index: int) -> dict[str, Tensor]:
        """The micro-batch on this rank's device; seeds the random numbers that are its own."""

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of a batch the model's `forward` is given."""

    def loss(self, output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        """The job's loss as (sum, count)."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The job's precision."""

    def zero(self) -> Tensor:
        """A scalar zero on this rank's device."""

    def beat(self) -> None:
        """Says that this rank is alive."""


class Technique(ABC):
    """A way to train one job on a gang without changing what is trained.

    Class attributes: `name`; `summary`, one line for people; `needs`, what a job and a gang must have.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    # The technique that does the same work with more memory and no more communication: where that fits with room to
    # spare, this one needs no trial.
    saves_memory_of: ClassVar[str | None] = None
    # Whether `parallelize` brings the model to the device itself, layer by layer; else it is there whole before.
    moves_model: ClassVar[bool] = False
    # Whether devices or moments have different layers: then what a few layers need says nothing of many.
    divides_layers: ClassVar[bool] = False
    # The kinds of adaptations beside plain training that it trains exactly: "distilled" where each row's whole output
    # is on the rank that takes its loss, "pruned" where the optimizer reads the gradients of `parameters()`.
    adaptations: ClassVar[frozenset[str]] = frozenset()
    # The job's, set by the harness before `parallelize`: what is sent between ranks is rounded to it, if anything is.
    precision: str = "fp32"
    communication: str = "fp32"
    # Whether a step may leave whole layers out (layer drop), likewise.
    skips_layers: bool = False

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

    def num_stages(self, gang: GangShape, config: Config) -> int:
        """Into how many consecutive stages the layers are cut. Where it is more than one, the config is given
        `stage_layers`, the layers of each for stages that take equally long, once layers have been measured.
        """
        return 1

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Bytes per device that this config needs at the least: an option above the device's memory is dropped."""
        return training_state_bytes(job, facts)

    def host_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Bytes of host memory that one device's part takes where it does not lie on the device: of GPUs only."""
        return 0

    def forward_backward(self, model: nn.Module, work: StepWork) -> tuple[Tensor, float]:
        """Gradients of the loss *sum* over this rank's share of a global step; returns that sum and its count.

        Micro-batches one after another; a technique with a schedule of its own (pipelines) replaces this.
        """
        loss_sum, count = work.zero(), 0.0
        for i in range(work.num_micro_batches):
            batch = work.batch(i)
            with self.accumulate(model, is_last=i == work.num_micro_batches - 1):
                part, part_count = work.loss(self.forward(model, batch, work), batch)
                part.backward()  # type: ignore[no-untyped-call]
            loss_sum = loss_sum + part.detach()  # not in place: it may become a sharded tensor
            count += float(part_count)
            work.beat()
        return loss_sum, count

    def part(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of a micro-batch this rank is given: all, unless sequences are divided."""
        return batch

    def forward(self, model: nn.Module, batch: dict[str, Tensor], work: StepWork) -> Any:
        """The model's output for one micro-batch, while training and while evaluating; None on ranks without any."""
        with work.autocast():
            return model(**work.inputs(batch))

    def loss_replicas(self, mesh: DeviceMesh | None) -> int:
        """How many ranks report the same loss for the same rows; 1 where each reports a part of its own."""
        return 1 if mesh is None else mesh.size() // data_parallel_size(mesh)

    def optimizer_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that this rank's optimizer updates."""
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def after_step(self, model: nn.Module) -> None:
        """After the optimizer's step: where ranks that updated different parameters exchange them."""
        return

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The optimizer's tensors under their canonical names `optimizer/<parameter>/<state>`."""
        from ringmaster.techniques.engine.state import named_optimizer_state

        return named_optimizer_state(self.unwrap(model), optimizer)

    def restore_optimizer(self, reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fills the optimizer from a checkpoint written under any technique."""
        from ringmaster.techniques.engine.state import restore_optimizer

        restore_optimizer(reader, self.unwrap(model), optimizer)

    def writes(self, name: str, tensor: Tensor, *, rank: int) -> bool:
        """Whether this rank writes its part of a tensor into a checkpoint; of replicas exactly one must."""
        from ringmaster.techniques.engine.state import is_first_replica

        return is_first_replica(tensor, rank=rank)

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around one micro-batch's forward and backward: where gradients are not exchanged until `is_last`."""
        return nullcontext()

    def gradient_divisor(self, mesh: DeviceMesh | None) -> int:
        """By how much the exchange divides the sum of the ranks' gradients (collectives that average: their size)."""
        return data_parallel_size(mesh)

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The global L2 norm of the gradient, a scalar equal on every rank."""
        from ringmaster.techniques.engine.gradients import global_norm

        return global_norm(parameters)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module whose parameters bear the names of the model that was given to `parallelize`."""
        return model


def training_state_bytes(job: Job, facts: ModelFacts) -> int:
    """Bytes of weights, gradients and optimizer state of a whole model (ZeRO, arXiv:1910.02054, section 3.1).

    Beside an adapter the model has weights alone.
    """
    of_trained = GRADIENT_BYTES + OPTIMIZER_STATE_BYTES[job.optimizer.name]
    return facts.num_parameters * WEIGHT_BYTES + facts.num_updated * of_trained


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


def why_pinned(job: Job) -> str | None:
    """Why this job's layout is `single`'s, on one slot, or None."""
    return "exact: true, and another layout adds in another order" if job.exact else None


def undivided_batch_only(job: Job, facts: ModelFacts) -> str | None:
    """Why this job's batch must not be divided at all, or None."""
    if reason := why_pinned(job):
        return reason
    if job.compile and facts.has_dropout:
        return "compile: true on a model with dropout, which compiled layers draw anew in another layout"
    return facts.whole_batch or None


def no_prefix(job: Job) -> str | None:
    """Why heads, layers or tokens of this job must not be divided, or None."""
    if job.adapter is not None and job.adapter.kind == "prefix":
        return "a prefix is of all heads and layers, before all tokens, and here these are divided"
    return None


def micro_batches(rows: int, *, at_most: int = 3) -> list[int]:
    """Rows of a forward pass to try, largest first: all of a rank's rows, a half, a quarter."""
    sizes = [rows]
    while len(sizes) < at_most and sizes[-1] % 2 == 0 and sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes
