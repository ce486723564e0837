"""A device mesh of combined parallelisms: pipelines of layers, batch and weights over groups, matrices within groups.

Sources: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (arXiv:2104.04473); Shazeer et
al., Mesh-TensorFlow (arXiv:1811.02084).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import product
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.expert_parallel import ExpertParallel
from ringmaster.techniques.fsdp import Fsdp
from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.model_facts import ModelFacts, why_positions_lost, why_unknown
from ringmaster.techniques.pipeline import Pipeline, micro_batch_counts
from ringmaster.techniques.technique import (
    Config,
    GangShape,
    StepWork,
    Technique,
    batch_is_divisible,
    no_prefix,
    training_state_bytes,
    undivided_batch_only,
)
from ringmaster.techniques.tensor_parallel import COMPILED_BY_SEQUENCE, TensorParallel, why_not_divisible

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


DIVIDED_EXPERTS = "divided_experts"
"""The key, in a config, that has the ranks of dp_shard keep their experts as `expert` does."""
AXES = ("pp", "dp_shard", "tp")  # neighbouring devices, which have the fastest links, lie along the last axis


class Mesh(Technique):
    """Combines at least two of `pipeline` (axis pp), `fsdp` (dp_shard, which divides the batch) and `tensor` (tp)."""

    name = "mesh"
    summary = "pipelines of stages, whose weights and batch are sharded over groups, and cut within them"
    needs = "four devices or more that make equal groups; what pipeline and tensor need of a model; 1/n of the state"
    adaptations = frozenset({DISTILLED, PRUNED})
    whole_layers = False
    whole_tensors = True

    moves_model = True
    divides_layers = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires a division of the devices that suits model and batch."""
        if gang.num_devices < 4:
            return "needs four devices or more"
        if reason := undivided_batch_only(job, facts) or no_prefix(job) or why_unknown(facts.decoder):
            return reason
        reasons = [_why_not(job, facts, sizes) for sizes in _sizes(gang)]
        if not reasons:
            return f"{gang.num_devices} devices make no equal groups"
        return None if None in reasons else reasons[0]

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields short pipelines and small groups first, as idle time and exchanges grow with their size."""
        assert facts.decoder is not None
        suitable = [sizes for sizes in _sizes(gang) if _why_not(job, facts, sizes) is None]
        # The knobs that save memory are switched on together, and come last.
        for (recompute, reshard), sizes in product((("none", False), ("full", True)), suitable):
            pp, dp_shard, tp = sizes
            rows = job.global_batch_size // dp_shard
            config = {
                "micro_batch": rows if pp == 1 else rows // micro_batch_counts(rows, pp)[0],
                "recompute": recompute,
                **dict(zip(AXES, sizes, strict=True)),
                "reshard": reshard,
                # Pipeline stages send whole sequences, as masks and positions are computed from these.
                "sequence_parallel": pp == 1 and facts.decoder.seq_len % tp == 0,
                "loss_parallel": pp == 1 and tp > 1 and job.loss is None,
            }
            if dp_shard > 1 and facts.num_experts and facts.num_experts % dp_shard == 0:
                yield {**config, DIVIDED_EXPERTS: True}
            yield config

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Returns the axes whose size is above 1.

        Raises ValueError where the sizes do not multiply to the number of the gang's devices.
        """
        sizes = {axis: int(config[axis]) for axis in AXES}
        if math.prod(sizes.values()) != gang.num_devices:
            raise ValueError(f"a mesh of {sizes} does not have {gang.num_devices} devices")
        return {_axis(axis, config): size for axis, size in sizes.items() if size > 1}

    def num_stages(self, gang: GangShape, config: Config) -> int:
        """Returns the size of the pp axis."""
        return int(config["pp"])

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the state share and of the gathered weights.

        The gathered weights are those of two layers with `reshard`, else those of the whole stage.
        """
        state = training_state_bytes(job, facts) // gang.num_devices
        if config["dp_shard"] == 1:
            return state
        whole_bytes, layer_bytes = facts.parameter_bytes, facts.largest_layer_bytes
        if config.get(DIVIDED_EXPERTS, False):
            whole_bytes -= facts.expert_bytes
            layer_bytes = max(layer_bytes - facts.expert_bytes // max(facts.num_layers, 1), 0)
        of_stage = whole_bytes // int(config["pp"])
        gathered = min(2 * layer_bytes, of_stage) if config["reshard"] else of_stage
        return state + gathered // int(config["tp"])

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Divides the model along `tp` first, then along `pp`, and shards the part that each rank then holds."""
        from ringmaster.techniques.training.recomputation import recompute_layers

        assert mesh is not None
        self._tensor = TensorParallel() if config["tp"] > 1 else None
        sharding = ExpertParallel if config.get(DIVIDED_EXPERTS, False) else Fsdp
        self._shards = sharding() if config["dp_shard"] > 1 else None
        self._pipeline = Pipeline() if config["pp"] > 1 else None
        self._mesh = mesh
        for technique in (self._tensor, self._shards, self._pipeline):
            if technique is not None:
                technique.precision, technique.communication = self.precision, self.communication
        if self._tensor is not None:
            model = self._tensor.parallelize(model, mesh, {**config, "recompute": "none"})

        def shard(part: nn.Module) -> nn.Module:
            recompute_layers(part, config["recompute"])
            if self._shards is None:
                return part
            axis = _axis("dp_shard", config)
            return self._shards.parallelize(part, mesh[axis], {**config, "recompute": "none"})

        if self._pipeline is None:
            return shard(model)
        return self._pipeline.cut(model, mesh, config, schedule="1f1b", lay_out=shard)

    def forward(self, model: nn.Module, batch: dict[str, Tensor], work: StepWork) -> Any:
        """Runs the pipeline's forward where there is one, else tensor parallelism's."""
        if self._pipeline is not None:
            return self._pipeline.forward(model, batch, work)
        assert self._tensor is not None
        return self._tensor.forward(model, batch, work)

    def forward_backward(self, model: nn.Module, work: StepWork) -> tuple[Tensor, float]:
        """Runs the pipeline's step where there is one, else the default step.

        Partial gradients of ranks are summed once a step.
        """
        from ringmaster.techniques.training.gradients import settle_, whole

        if self._pipeline is not None:
            loss_sum, count = self._pipeline.forward_backward(model, work)
        else:
            loss_sum, count = super().forward_backward(model, work)
        if isinstance(self._shards, ExpertParallel):
            self._shards.fill_gradients()
        settle_(model.parameters())
        return whole(loss_sum), count

    def loss_replicas(self, mesh: DeviceMesh | None) -> int:
        """Returns the size of the tp axis, whose ranks report the same loss.

        In a pipeline, only the ranks of the last stage report a loss.
        """
        return 1 if self._tensor is None else self._mesh["tp"].size()

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Enters the contexts of `tensor` (parallel loss) and `fsdp` (gradients exchanged at the last micro-batch)."""
        stack = ExitStack()
        for technique in (self._tensor, self._shards):
            if technique is not None:
                stack.enter_context(technique.accumulate(model, is_last=is_last))
        return stack

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Returns the norm over the parts of each parameter and over all stages."""
        return super().grad_norm(parameters) if self._pipeline is None else self._pipeline.grad_norm(parameters)

    def writes(self, name: str, tensor: Tensor, *, rank: int) -> bool:
        """Returns whether this rank writes `tensor`.

        It writes its part of a DTensor. Of a replicated tensor, only the first rank of the stage writes it.
        """
        from torch.distributed.tensor import DTensor

        if self._pipeline is not None and not self._pipeline.writes(name, tensor, rank=rank):
            return False
        if isinstance(tensor, DTensor):
            return super().writes(name, tensor, rank=rank)
        names = self._mesh.mesh_dim_names or ()
        return all(self._mesh.get_local_rank(axis) == 0 for axis in names if axis != "pp")

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the model with all parameters that this rank holds."""
        return model if self._pipeline is None else self._pipeline.unwrap(model)


def _axis(axis: str, config: Config) -> str:
    return "dp_expert" if axis == "dp_shard" and config.get(DIVIDED_EXPERTS, False) else axis


def _sizes(gang: GangShape) -> list[tuple[int, int, int]]:
    """Returns the sizes (pp, dp_shard, tp), at least two of them above 1, whose product is the gang's size.

    tp stays inside a node, as that axis communicates most.
    """
    num, a_node = gang.num_devices, gang.num_devices // gang.num_nodes
    divisors = [size for size in range(1, num + 1) if num % size == 0]
    every = [(pp, num // (pp * tp), tp) for pp in divisors for tp in divisors if num % (pp * tp) == 0 and tp <= a_node]
    return [sizes for sizes in every if sum(size > 1 for size in sizes) > 1]


def _why_not(job: Job, facts: ModelFacts, sizes: tuple[int, int, int]) -> str | None:
    pp, dp_shard, tp = sizes
    if tp > 1 and facts.has_dropout:
        return "the model drops out, and ranks that hold different heads would draw the same mask"
    if tp > 1 and (reason := why_not_divisible(facts.decoder, tp)):
        return reason
    if tp > 1 and job.compile and (pp > 1 or facts.decoder is None or facts.decoder.seq_len % tp):
        return f"{COMPILED_BY_SEQUENCE}, which a pipeline sends whole"
    if pp > 1 and (reason := why_positions_lost(facts.decoder)):
        return reason
    if pp > facts.num_layers:
        return f"{facts.num_layers} layers are too few for {pp} stages"
    if reason := batch_is_divisible(job, dp_shard):
        return reason
    if job.global_batch_size // dp_shard < pp:
        return f"global_batch_size {job.global_batch_size} makes no {pp} micro-batches for each of {dp_shard} pipelines"
    return None
