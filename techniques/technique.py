"""The `Technique` interface: what a parallelism technique defines.

A data-parallel technique needs a name, its requirements, its configs, and `parallelize`; `ddp.py` is one. Leave all
other attributes at their defaults first: they promise nothing. The trainer (`ringmaster.techniques.training`) owns the
training loop, data, timing, checkpoints, signals and metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import OF_WHOLE_TENSORS, VIRTUAL_TOKENS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.checkpoints.state import Reader
    from ringmaster.techniques.model_facts import ModelFacts
    from ringmaster.techniques.training.exact_sums import SumTree

Config = Mapping[str, Any]

# The activations that a layer recomputes in backward, the quickest mode first: see `training.recomputation`.
RECOMPUTE = ("none", "selective", "full")

# The config key of the kernels that compute a step, of jobs with `numerics`, and the first word of those of attention:
# see `ringmaster.features.kernels`.
KERNELS, ATTENTION = "kernels", "attention"

# How a group stores its base on several devices: see `Technique.base_of_group`.
WHOLE, SHARDED = "whole", "sharded"

# How ranks take the chunks of an exact job: see `Technique.takes_chunks`.
CONSECUTIVE, INTERLEAVED = "run", "turn"

# Bytes for each parameter of fp32 weights and gradients, and of the optimizer's state.
WEIGHT_BYTES, GRADIENT_BYTES = 4, 4
# Of "adafactor", rows and columns of matrices are too small to count; of "muon", matrices have 4 and all else has 8.
OPTIMIZER_STATE_BYTES = {"adafactor": 0, "adamw": 8, "lion": 4, "muon": 4, "sgd": 4}


@dataclass(frozen=True, kw_only=True)
class GangShape:
    """Properties of a gang that a technique may use before devices are assigned.

    kind: "cpu" (a slot of cores) or "gpu".
    memory_bytes: memory of one device.
    """

    kind: str
    num_devices: int
    memory_bytes: int
    num_nodes: int = 1


class StepWork(Protocol):
    """One rank's part of a global step, which the trainer passes to `Technique.forward_backward`."""

    @property
    def num_micro_batches(self) -> int:
        """The number of forward passes that the part is divided into; at least one."""

    is_measured: bool
    """Whether the ranks exchange the gradients of their first micro-batches by themselves."""

    def measure_part(self, count: float) -> None:
        """Measures the gradients of the first micro-batch, which all ranks have exchanged. count: of its loss here."""

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns a micro-batch on this rank's device, and seeds its random numbers."""

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the entries of a batch that the model's `forward` takes."""

    def loss(self, output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        """Returns the job's loss as (sum, count)."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the autocast context of the job's precision."""

    def zero(self) -> Tensor:
        """Returns a scalar zero on this rank's device."""

    def beat(self) -> None:
        """Reports that this rank is alive."""


class Technique(ABC):
    """A way to train one job on a gang without changing what is trained.

    Attributes:
        name: name in batch files and plans.
        summary: one line for users.
        needs: requirements on a job and a gang, for users.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    # The technique that does the same work with more memory and no more communication. Where that one fits with ample
    # memory, this one needs no trial.
    saves_memory_of: ClassVar[str | None] = None
    # Whether `parallelize` moves the model to the device, layer by layer; else the trainer moves it whole before.
    moves_model: ClassVar[bool] = False
    # Whether devices hold different layers, or a device holds different ones over time. If so, the memory of a model
    # with few layers does not extrapolate to many.
    divides_layers: ClassVar[bool] = False
    # The kinds of adaptation besides plain training that the technique trains exactly: "distilled" where each row's
    # whole output is on the rank that computes its loss, "pruned" where the optimizer reads the gradients of
    # `parameters()`.
    adaptations: ClassVar[frozenset[str]] = frozenset()
    # Whether layers may be called several times in a step, such as for each of several jobs that share them.
    reuses_layers: ClassVar[bool] = False
    # WHOLE or SHARDED where the technique trains a job as a group on several devices does, whose base is stored so: the
    # batch is divided, and each device has all weights, or a shard of each layer. Its times then predict the group's.
    base_of_group: ClassVar[str | None] = None
    # Whether the optimizer gets whole parameters, or DTensors, from which it can gather whole ones. If not, optimizers
    # that need whole tensors are refused.
    whole_tensors: ClassVar[bool] = False
    # Whether each device has the whole model, in `unwrap(model)`, between steps, so that it can generate.
    generates: ClassVar[bool] = False
    # Whether the weights of a linear layer are whole where it computes, and whether they may be packed in bytes.
    whole_layers: ClassVar[bool] = True
    takes_packed_weights: ClassVar[bool] = False
    # How a rank takes the chunks of an exact job, where sums have the bits of those of `single`: CONSECUTIVE
    # chunks, or INTERLEAVED ones (each n-th of n ranks). None: the technique adds in an order of its own.
    takes_chunks: ClassVar[str | None] = None
    # Whether the ranks' gradients of one micro-batch can be exchanged by themselves, and are then whole or sharded as
    # the optimizer's state is. If so, the noise scale can be measured.
    measures_noise: ClassVar[bool] = False
    # Whether it trains jobs with local updates, and only these.
    updates_locally: ClassVar[bool] = False
    # Whether the kernels of a job with `numerics` may be chosen: see `ringmaster.features.kernels`.
    takes_kernels: ClassVar[bool] = False
    # The job's precisions of computation and of communication between ranks, set by the trainer before `parallelize`.
    precision: str = "fp32"
    communication: str = "fp32"
    # Whether the job is exact, set likewise. Each micro-batch then is a chunk: see `training.exact_sums`.
    exact: bool = False
    # Whether a step may skip whole layers (layer drop), set by the trainer before `parallelize`.
    skips_layers: bool = False

    @abstractmethod
    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Returns None, or a message that says why this job cannot be trained with the technique on such a gang."""

    @abstractmethod
    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields the search space, the presumably cheapest config first; no config changes the trained weights."""

    @abstractmethod
    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Returns the model, laid out over the mesh (None for a single process). Parameters keep their names."""

    def trained_job(self, job: Job) -> Job:
        """Returns a job as the technique trains it now."""
        return job

    def updates_on_host(self, config: Config) -> bool:
        """Returns whether weights and optimizer stay in host memory, and are copied to the device for each use."""
        return False

    def num_ranks(self, gang: GangShape) -> int:
        """Returns the number of worker processes of a gang; by default one a device."""
        return gang.num_devices

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Returns the axes of the device mesh and their sizes, outermost first.

        These are pp, those that divide the batch (dp_replicate, dp_shard, dp_expert: all that begin with "dp"), cp and
        tp. `estimates.memory.sharding` and `estimates.time_estimate` know them by these names; another one is neither
        counted as sharding nor as communication there.
        """
        return {"dp_replicate": self.num_ranks(gang)}

    def num_stages(self, gang: GangShape, config: Config) -> int:
        """Returns the number of consecutive stages that the layers are cut into.

        Where it is more than one, and layers have been measured, the config gets the key `stage_layers`: the number of
        layers of each stage, such that all stages take equally long.
        """
        return 1

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the least bytes per device that this config needs; options above the device's memory are dropped."""
        return training_state_bytes(job, facts)

    def host_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns bytes of host memory for one device's state that does not lie on the device; on GPUs only."""
        return 0

    def on_host(self) -> Iterable[Tensor]:
        """Returns tensors in host memory now, in addition to the weights, gradients and state of a job updated on the
        host."""
        return ()

    def forward_backward(self, model: nn.Module, work: StepWork) -> tuple[Tensor, float]:
        """Computes gradients of the loss *sum* over this rank's part of a global step; returns that sum and its count.

        Micro-batches run one after another. Techniques with a schedule of their own (pipelines) override this.
        """
        loss_sum, count = work.zero(), 0.0
        for i in range(work.num_micro_batches):
            batch = work.batch(i)
            is_first_part = work.is_measured and i == 0
            with self.accumulate(model, is_last=is_first_part or i == work.num_micro_batches - 1):
                part, part_count = work.loss(self.forward(model, batch, work), batch)
                part.backward()  # type: ignore[no-untyped-call]
            if is_first_part:
                work.measure_part(float(part_count))
            if self.exact:
                self.add_chunk(model, is_last=i == work.num_micro_batches - 1)
            loss_sum = loss_sum + part.detach()  # not in place: the sum may become a sharded tensor
            count += float(part_count)
            work.beat()
        return loss_sum, count

    @cached_property
    def chunks(self) -> SumTree:
        """The gradients of an exact job's chunks so far, in the present step."""
        from ringmaster.techniques.training.exact_sums import SumTree

        return SumTree()

    def add_chunk(self, model: nn.Module, *, is_last: bool) -> None:
        """Adds the gradients of a chunk of an exact job to those before it; the last one completes the sums."""
        from ringmaster.techniques.training.exact_sums import take_gradients

        self.chunks.add(take_gradients(model.parameters()))
        if is_last:
            for parameter, gradient in self.chunks.pop().items():
                parameter.grad = gradient

    def width_divisor(self, mesh: DeviceMesh | None) -> int:
        """Returns a number that divides the width, in tokens, to which the samples of a step are padded.

        By default it is the number of ranks that divide matrices, which may divide the tokens too.
        """
        names = mesh.mesh_dim_names if mesh is not None else None
        return mesh["tp"].size() if mesh is not None and "tp" in (names or ()) else 1

    def part(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's part of a micro-batch: all of it, unless sequences are divided."""
        return batch

    def forward(self, model: nn.Module, batch: dict[str, Tensor], work: StepWork) -> Any:
        """Returns the model's output for one micro-batch, in training and evaluation; None on ranks without output."""
        with work.autocast():
            return model(**work.inputs(batch))

    def loss_replicas(self, mesh: DeviceMesh | None) -> int:
        """Returns how many ranks report the same loss for the same rows; 1 where each rank reports its own part."""
        return 1 if mesh is None else mesh.size() // data_parallel_size(mesh)

    def optimizer_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Returns the parameters that this rank's optimizer updates."""
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def parameter_names(self, model: nn.Module) -> Mapping[nn.Parameter, str]:
        """Returns the name, in the model that was given to `parallelize`, of each of `optimizer_parameters`."""
        return {parameter: name for name, parameter in self.unwrap(model).named_parameters()}

    def after_step(self, model: nn.Module) -> None:
        """Runs after the optimizer's step: ranks that updated different parameters exchange them here."""
        return

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Returns the optimizer's tensors under their canonical names `optimizer/<parameter>/<state>`."""
        from ringmaster.techniques.checkpoints.state import named_optimizer_state

        return named_optimizer_state(self.unwrap(model), optimizer)

    def restore_optimizer(self, reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Loads the optimizer's state from a checkpoint written under any technique."""
        from ringmaster.techniques.checkpoints.state import restore_optimizer

        restore_optimizer(reader, self.unwrap(model), optimizer)

    def writes(self, name: str, tensor: Tensor, *, rank: int) -> bool:
        """Returns whether this rank writes its part of a tensor into a checkpoint; exactly one replica must."""
        from ringmaster.techniques.checkpoints.state import is_first_replica

        return is_first_replica(tensor, rank=rank)

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Returns the context of one micro-batch's forward and backward.

        A data-parallel technique exchanges no gradients in it, except in that of the last micro-batch.
        """
        return nullcontext()

    def gradient_divisor(self, mesh: DeviceMesh | None) -> int:
        """Returns the number by which the exchange divides the sum of the ranks' gradients.

        That is the group's size for collectives that average, and 1 for those that sum.
        """
        return 1 if self.exact else data_parallel_size(mesh)

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Returns the global L2 norm of the gradient, a scalar equal on every rank."""
        from ringmaster.techniques.training.gradients import global_norm

        return global_norm(parameters, exact=self.exact)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the module whose parameters have the names of the model that was given to `parallelize`."""
        return model


class DataParallel(Technique):
    """Divides the global batch over all devices of the gang; subclasses lay out the model.

    Attributes:
        knobs: the technique's own config keys and their values, the presumably cheapest first.
    """

    knobs: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires two devices or more, and a global batch that may be, and can be, divided over them."""
        if gang.num_devices < 2:
            return "needs two devices or more"
        return undivided_batch_only(job, facts) or batch_is_divisible(job, gang.num_devices)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields fewer, larger micro-batches first; recomputation comes last, as it only serves to save memory."""
        sizes = micro_batches(job, num_slices=gang.num_devices)
        for recompute, *values, micro_batch in product(RECOMPUTE, *self.knobs.values(), sizes):
            yield {"micro_batch": micro_batch, "recompute": recompute, **dict(zip(self.knobs, values, strict=True))}


def training_state_bytes(job: Job, facts: ModelFacts) -> int:
    """Returns bytes of weights, gradients and optimizer state of a whole model (ZeRO, arXiv:1910.02054, section 3.1).

    Frozen weights, as of a model with an adapter, have neither gradients nor optimizer state.
    """
    of_trained = GRADIENT_BYTES + OPTIMIZER_STATE_BYTES[job.optimizer.name]
    return facts.num_parameters * WEIGHT_BYTES + facts.num_updated * of_trained


def data_parallel_axes(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Returns the mesh's axes over which the global batch is divided."""
    names = mesh.mesh_dim_names if mesh is not None else None
    return tuple(name for name in names or () if name.startswith("dp"))


def data_parallel_size(mesh: DeviceMesh | None) -> int:
    """Returns the number of slices that the global batch is divided into."""
    size = 1
    for axis in data_parallel_axes(mesh):
        assert mesh is not None
        size *= mesh[axis].size()
    return size


def data_parallel_rank(mesh: DeviceMesh | None) -> int:
    """Returns the index of this rank's slice of the global batch."""
    rank = 0
    for axis in data_parallel_axes(mesh):
        assert mesh is not None
        rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)
    return rank


def batch_is_divisible(job: Job, num_slices: int) -> str | None:
    """Returns why a global batch cannot be divided into `num_slices` equal slices, or None."""
    if job.global_batch_size % num_slices:
        return f"global_batch_size {job.global_batch_size} is not a multiple of {num_slices} devices"
    return None


MAX_CHUNKS = 8
"""Chunks of a global batch, unless a job gives their size: as many as a usual machine has devices."""
MIN_CHUNK = 4
"""Samples of a chunk, unless a job gives it: fewer cost more than a fifth of a step."""


def choose_chunk(job: Job, facts: ModelFacts) -> int | None:
    """Returns the chunk of an exact job, the samples of a forward and backward; None for other jobs.

    The chunk decides the bits of the result. It therefore follows from the job alone, and never from the devices that
    are there or that the job may use. The number of chunks is a power of two. A batch that must not be divided is one
    chunk. With local updates, so is a worker's part.
    """
    if not job.is_exact or job.exact_chunk is not None:
        return job.exact_chunk
    if job.num_workers is not None:
        return job.global_batch_size // job.num_workers
    chunk = job.global_batch_size
    least = max(MIN_CHUNK, -(-chunk // MAX_CHUNKS))
    while not undivided_batch_only(job, facts) and chunk % 2 == 0 and chunk // 2 >= least:
        chunk //= 2
    return chunk


def why_not_exact(technique: Technique, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
    """Returns why an exact job would not have the bits of `single` under a technique on a gang, or None."""
    if not job.is_exact or not job.trains or job.is_black_box:
        return None
    what = "exact: true" if job.exact else next(each.key for each in job.features if each.is_exact)
    if technique.takes_chunks is None:
        return f"{what}, and its sums within a sample depend on the number of devices"
    num_ranks = technique.num_ranks(gang)
    if gang.num_devices > num_ranks:
        return f"{what}, and a kernel of more threads adds in another order"
    if num_ranks == 1:
        return None
    if job.communication != "fp32":
        return f"{what}, and communication: {job.communication} rounds what only several devices send"
    chunk = job.exact_chunk or job.global_batch_size
    if technique.divides_layers and facts.decoder is not None and facts.decoder.is_tied and facts.num_trained is None:
        return f"{what}, and embedding and head are one weight, whose gradients are added once a step"
    if (job.global_batch_size // chunk) % num_ranks:
        chunks = f"{job.global_batch_size // chunk} chunks of {chunk} samples"
        return f"{what}, and its {chunks} cannot be divided by {num_ranks} devices (exact_chunk sets the chunk)"
    return None


def why_no_optimizer(technique: Technique, job: Job) -> str | None:
    """Returns why a technique cannot take the steps of a job's optimizer exactly, or None."""
    name = job.optimizer.name
    if technique.updates_locally != (job.num_workers is not None):
        if technique.updates_locally:
            return f"{technique.name} is for jobs with local_updates"
        return f"local_updates, of which {technique.name} knows nothing"
    if name in OF_WHOLE_TENSORS and not technique.whole_tensors:
        return f"{name} needs whole matrices, and {technique.name} holds a part of each"
    return None


def undivided_batch_only(job: Job, facts: ModelFacts) -> str | None:
    """Returns why this job's batch must not be divided at all, or None."""
    if job.compile and facts.has_dropout:
        return "compile: true on a model with dropout, which compiled layers draw again in another layout"
    return facts.whole_batch or None


def no_prefix(job: Job) -> str | None:
    """Returns why heads, layers or tokens of this job must not be divided, or None."""
    if job.adapter is not None and job.adapter.kind in VIRTUAL_TOKENS:
        return f"a {job.adapter.kind} is of all heads and layers, before all tokens, and here these are divided"
    return None


def micro_batches(job: Job, *, num_slices: int = 1, at_most: int = 3) -> list[int]:
    """Returns the rows of a forward pass to try, largest first: all of a slice of the batch, a half, a quarter.

    For an exact job, that is its chunk.
    """
    sizes = [job.global_batch_size // num_slices]
    if job.is_exact:
        return [job.exact_chunk or job.global_batch_size]
    while len(sizes) < at_most and sizes[-1] % 2 == 0 and sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes
