"""Fully sharded data parallel (FSDP2): weights, gradients and optimizer state divided over the devices.

Sources: Rajbhandari et al., ZeRO stage 3 (arXiv:1910.02054); Zhao et al., PyTorch FSDP, with hybrid sharding
(arXiv:2304.11277); Ren et al., ZeRO-Offload (arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.data_parallel import DataParallel
from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.technique import (
    RECOMPUTE,
    Config,
    GangShape,
    micro_batches,
    training_state_bytes,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from ringmaster.techniques.engine.models import ModelFacts


class Fsdp(DataParallel):
    """Each layer's weights are gathered for its forward and backward, its gradients reduced and scattered.

    Config, besides `micro_batch` and `recompute`; a key that is left out has the value in brackets:
    reshard: free a layer's gathered weights after its forward, and gather them again for its backward.
    num_replicas [1]: groups of devices that each hold the whole state divided among them (HSDP): gathers stay inside
        a group, such as a node, and only gradient shards cross.
    prefetch [1]: layers gathered ahead of the one that computes.
    offload [False]: weights, gradients and optimizer state in host memory, where the optimizer runs (ZeRO-Offload).
    """

    name = "fsdp"
    summary = "weights, gradients and optimizer state sharded; layers gathered when needed"
    needs = "two devices or more; 1/n of the training state and two whole layers in each device's memory"
    adaptations = frozenset({DISTILLED, PRUNED})

    saves_memory_of = "ddp"
    moves_model = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Needs parameters that can be divided, too."""
        if facts.scalar:
            return f"parameter {facts.scalar} is a single number, which cannot be sharded"
        return super().supports(job, gang, facts)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """A dozen: what communicates least first, what needs least memory last.

        Layers kept gathered between forward and backward save a gather, so they come first. Groups and prefetching are
        tried with the largest micro-batch alone. Recomputing, and last of all offloading, are for want of memory.
        """
        sizes = micro_batches(job.global_batch_size // gang.num_devices)
        variants: list[Config] = []
        num_replicas = max(gang.num_nodes, 2)  # groups: one a node, or two, of at least two devices each
        if gang.num_devices % num_replicas == 0 and gang.num_devices > num_replicas:
            variants.append({"num_replicas": num_replicas})
        if gang.kind == "gpu":  # on a CPU the one who gathers is the one who computes
            variants.append({"prefetch": 2})
        for micro_batch in sizes:
            yield {"micro_batch": micro_batch, "recompute": "none", "reshard": False}
        for variant in variants:
            yield {"micro_batch": sizes[0], "recompute": "none", "reshard": True, **variant}
        for recompute in RECOMPUTE:
            for micro_batch in sizes[:1] if recompute == "selective" else sizes:
                yield {"micro_batch": micro_batch, "recompute": recompute, "reshard": True}
        if gang.kind == "gpu":  # a CPU's memory is the host's
            yield {"micro_batch": sizes[-1], "recompute": "full", "reshard": True, "offload": True}

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Batch and weights are divided alike over `dp_shard`; over `dp_replicate`, the batch alone."""
        num_replicas = config.get("num_replicas", 1)
        num_shards, left_over = divmod(gang.num_devices, num_replicas)
        if left_over:
            raise ValueError(f"{gang.num_devices} devices cannot be divided into {num_replicas} equal groups")
        return {"dp_shard": num_shards} if num_replicas == 1 else {"dp_replicate": num_replicas, "dp_shard": num_shards}

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """A share of the state unless that is offloaded, and the gathered weights: some layers, or all."""
        num_shards = gang.num_devices // config.get("num_replicas", 1)
        state_bytes = 0 if config.get("offload", False) else training_state_bytes(job, facts) // num_shards
        ahead_bytes = (1 + config.get("prefetch", 1)) * facts.largest_layer_bytes
        gathered_bytes = min(ahead_bytes, facts.parameter_bytes) if config["reshard"] else facts.parameter_bytes
        return state_bytes + gathered_bytes

    def host_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """The share of the state that is offloaded."""
        if gang.kind != "gpu" or not config.get("offload", False):
            return 0
        num_shards: int = gang.num_devices // config.get("num_replicas", 1)
        return training_state_bytes(job, facts) // num_shards

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Shards each layer, then what is left (embedding, norm, head) with the root."""
        import torch
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        from ringmaster.techniques.engine.models import layer_names
        from ringmaster.techniques.engine.recomputation import recompute_layers

        assert mesh is not None
        recompute_layers(model, config["recompute"])
        # Pinned memory needs an accelerator to pin it for.
        pinned = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        policies: dict[str, Any] = {
            "offload_policy": pinned if config.get("offload", False) else OffloadPolicy(),
            "mp_policy": MixedPrecisionPolicy(
                # Weights are gathered as they are computed with; gradients add up in fp32 unless told otherwise.
                param_dtype=torch.bfloat16 if self.precision == "bf16-params" else None,
                reduce_dtype=torch.bfloat16 if self.communication == "bf16" else torch.float32,
            ),
        }
        layers: list[FSDPModule] = []
        for name in layer_names(model):
            layer = model.get_submodule(name)
            fully_shard(layer, mesh=mesh, reshard_after_forward=config["reshard"], **policies)
            assert isinstance(layer, FSDPModule)  # in place: a module changes its class
            layers.append(layer)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, **policies)
        if (depth := config.get("prefetch", 1)) > 1:
            _gather_ahead(layers, depth)
        return model

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients stay whole on each rank until the last micro-batch, then they are reduced and scattered once."""
        return _gradient_sync(model, enabled=is_last)


def _gather_ahead(layers: Sequence[FSDPModule], depth: int) -> None:
    """Layer i gathers those up to i + depth before it computes, and on the way back those down to i - depth."""
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[i + 1 : i + 1 + depth]))
        layer.set_modules_to_backward_prefetch(list(layers[max(i - depth, 0) : i][::-1]))


@contextmanager
def _gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(enabled)  # type: ignore[operator]
    yield
