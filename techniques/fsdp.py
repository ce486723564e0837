"""Fully sharded data parallel (FSDP2): weights, gradients and optimizer state are sharded over the devices.

Sources: Rajbhandari et al., ZeRO stage 3 (arXiv:1910.02054); Zhao et al., PyTorch FSDP, with hybrid sharding
(arXiv:2304.11277); Ren et al., ZeRO-Offload (arXiv:2101.06840). Static buffers: YaFSDP (github.com/yandex/YaFSDP),
implemented with the custom collectives of PyTorch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.job_specs import OF_WHOLE_TENSORS
from ringmaster.techniques.technique import (
    INTERLEAVED,
    RECOMPUTE,
    SHARDED,
    Config,
    DataParallel,
    GangShape,
    micro_batches,
    training_state_bytes,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from ringmaster.techniques.model_facts import ModelFacts

SHARDS_INTEGERS = (2, 13)  # torch 2.11 takes every sharded parameter for one that requires a gradient


class Fsdp(DataParallel):
    """Gathers each layer's weights for its forward and backward, and reduces and scatters its gradients.

    Config keys, besides `micro_batch` and `recompute`; the default is in brackets:
    reshard: free a layer's gathered weights after its forward, and gather them again for its backward.
    num_replicas [1]: number of device groups that each hold a whole, sharded copy of the state (HSDP). Gathers stay
        inside a group, such as a node; only gradient shards cross groups.
    prefetch [1]: number of layers gathered ahead of the one that computes.
    offload [False]: keep weights, gradients and optimizer state in host memory, and run the optimizer there
        (ZeRO-Offload).
    """

    name = "fsdp"
    summary = "weights, gradients and optimizer state sharded; layers gathered when needed"
    needs = "two devices or more; 1/n of the training state and two whole layers in each device's memory"
    adaptations = frozenset({DISTILLED, PRUNED})
    reuses_layers = True
    base_of_group: ClassVar[str | None] = SHARDED
    takes_packed_weights = tuple(map(int, version("torch").split(".")[:2])) >= SHARDS_INTEGERS
    whole_tensors = True
    takes_chunks: ClassVar[str | None] = INTERLEAVED
    measures_noise = True
    saves_memory_of: ClassVar[str | None] = "ddp"
    moves_model = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires what data-parallel techniques do, and no scalar parameter."""
        if facts.scalar:
            return f"parameter {facts.scalar} is a single number, which cannot be sharded"
        return super().supports(job, gang, facts)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields about a dozen configs: the least communication first, the least memory last.

        Layers that stay gathered between forward and backward save a gather, so they come first. Replica groups and
        prefetching are tried with the largest micro-batch only. Recomputation and, last of all, offloading serve models
        that need the memory.
        """
        sizes = micro_batches(job, num_slices=gang.num_devices)
        variants: list[Config] = []
        num_replicas = max(gang.num_nodes, 2)  # one group a node, or two groups; at least two devices in each
        if gang.num_devices % num_replicas == 0 and gang.num_devices > num_replicas and not job.is_exact:
            variants.append({"num_replicas": num_replicas})
        if gang.kind == "gpu":  # on a CPU the same cores gather and compute, so prefetching gains nothing
            variants.append({"prefetch": 2})
        for micro_batch in sizes:
            yield {"micro_batch": micro_batch, "recompute": "none", "reshard": False}
        for variant in variants:
            yield {"micro_batch": sizes[0], "recompute": "none", "reshard": True, **variant}
        for recompute in RECOMPUTE:
            for micro_batch in sizes[:1] if recompute == "selective" else sizes:
                yield {"micro_batch": micro_batch, "recompute": recompute, "reshard": True}
        # A CPU slot's memory is host memory already; and the GPUs' links gather no tensors that lie in host memory.
        if gang.kind == "gpu" and job.optimizer.name not in OF_WHOLE_TENSORS and not job.is_exact:
            yield {"micro_batch": sizes[-1], "recompute": "full", "reshard": True, "offload": True}

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Returns `dp_shard`, which divides batch and weights, and `dp_replicate`, which divides the batch only.

        `dp_replicate` exists only with several replica groups. Raises ValueError where the groups would be unequal.
        """
        num_replicas = config.get("num_replicas", 1)
        num_shards, left_over = divmod(gang.num_devices, num_replicas)
        if left_over:
            raise ValueError(f"{gang.num_devices} devices cannot be divided into {num_replicas} equal groups")
        return {"dp_shard": num_shards} if num_replicas == 1 else {"dp_replicate": num_replicas, "dp_shard": num_shards}

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the state shard, unless it is offloaded, and of the gathered weights.

        The gathered weights are those of some layers with `reshard`, else those of all layers.
        """
        num_shards = gang.num_devices // config.get("num_replicas", 1)
        state_bytes = 0 if config.get("offload", False) else training_state_bytes(job, facts) // num_shards
        ahead_bytes = (1 + config.get("prefetch", 1)) * facts.largest_layer_bytes
        gathered_bytes = min(ahead_bytes, facts.parameter_bytes) if config["reshard"] else facts.parameter_bytes
        return state_bytes + gathered_bytes

    def updates_on_host(self, config: Config) -> bool:
        """Returns whether the config offloads the state."""
        return bool(config.get("offload", False))

    def host_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the state shard that is offloaded."""
        if gang.kind != "gpu" or not config.get("offload", False):
            return 0
        num_shards: int = gang.num_devices // config.get("num_replicas", 1)
        return training_state_bytes(job, facts) // num_shards

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Shards each layer, then the remaining parameters (embedding, norm, head) with the root module."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from ringmaster.techniques.models.layers import layer_names
        from ringmaster.techniques.training.recomputation import recompute_layers

        assert mesh is not None
        recompute_layers(model, config["recompute"])
        policies = self._policies(mesh, config)
        layers: list[FSDPModule] = []
        for name in layer_names(model):
            layer = model.get_submodule(name)
            fully_shard(layer, mesh=mesh, reshard_after_forward=config["reshard"], **policies)
            assert isinstance(layer, FSDPModule)  # `fully_shard` changes the class of a module in place
            layers.append(layer)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, **policies)
        if (depth := config.get("prefetch", 1)) > 1:
            _gather_ahead(layers, depth)
        if self.exact:
            _add_by_tree(model)
        return model

    def _policies(self, mesh: DeviceMesh, config: Config) -> dict[str, Any]:
        """Returns the arguments of `fully_shard` that all modules share."""
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        # Pinned memory requires an accelerator.
        pinned = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        return {
            "offload_policy": pinned if config.get("offload", False) else OffloadPolicy(),
            "mp_policy": MixedPrecisionPolicy(
                # Weights are gathered in the precision of computation; gradients are summed in fp32 by default. A
                # weight that is used twice has two gradients in bf16, which other techniques round before adding.
                param_dtype=torch.bfloat16 if self.precision == "bf16-params" and not self.exact else None,
                reduce_dtype=torch.bfloat16 if self.communication == "bf16" else torch.float32,
            ),
        }

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Leaves gradients whole on each rank until the last micro-batch, which reduces and scatters them once.

        Those of an exact job are reduced chunk by chunk, over ranks first.
        """
        return _gradient_sync(model, enabled=is_last or self.exact)


def _add_by_tree(model: nn.Module) -> None:
    """Makes all collectives that reduce gradients sum them along the tree over ranks."""
    from torch.distributed.fsdp import FSDPModule

    from ringmaster.techniques.sharding.buckets import SummingReduceScatter

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(SummingReduceScatter(None, exact=True))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _gather_ahead(layers: Sequence[FSDPModule], depth: int) -> None:
    """Makes layer i prefetch the layers up to i + depth in forward, and those down to i - depth in backward."""
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[i + 1 : i + 1 + depth]))
        layer.set_modules_to_backward_prefetch(list(layers[max(i - depth, 0) : i][::-1]))


@contextmanager
def _gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(enabled)  # type: ignore[operator]
    yield


class FsdpStatic(Fsdp):
    """Works as `fsdp` with `reshard` and `num_replicas`; after the first step its collectives allocate no memory.

    Gathered weights and reduced gradients lie in buffers that are allocated once.
    """

    name = "fsdp_static"
    summary = "as fsdp, with gather and reduce buffers allocated once"
    needs = "two devices or more; 1/n of the training state and five whole layers in each device's memory"
    takes_packed_weights = False  # its buffers have one dtype

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields the configs of `fsdp` that acquire and release buffers in a fixed order.

        Those are the configs without `prefetch` and `offload`.
        """
        for config in super().configs(job, gang, facts):
            if not {"offload", "prefetch"} & set(config):
                yield config

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the memory of `fsdp`, plus two buffers for gathering layers and one for reducing their gradients."""
        return super().estimate_memory(job, gang, config, facts) + 3 * facts.largest_layer_bytes

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Shards the model as `fsdp`. All layers share one pool of gather buffers and one pool of reduce buffers."""
        from torch.distributed.fsdp import FSDPModule

        from ringmaster.techniques.sharding.buckets import BufferPool, StaticAllGather, SummingReduceScatter

        model = super().parallelize(model, mesh, config)
        gather, reduce = StaticAllGather(BufferPool()), SummingReduceScatter(BufferPool(), exact=self.exact)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
        return model
