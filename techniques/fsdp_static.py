"""FSDP with static buffers: gathered weights and reduced gradients lie in memory that is allocated once.

Source: YaFSDP (github.com/yandex/YaFSDP); implemented with the custom collectives of PyTorch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringmaster.techniques.fsdp import Fsdp
from ringmaster.techniques.job import Job
from ringmaster.techniques.technique import Config, GangShape

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.model_facts import ModelFacts


class FsdpStatic(Fsdp):
    """Works as `fsdp` with `reshard` and `num_replicas`; after the first step its collectives allocate no memory."""

    name = "fsdp_static"
    summary = "as fsdp, with gather and reduce buffers allocated once"
    needs = "two devices or more; 1/n of the training state and five whole layers in each device's memory"
    takes_4_bits = False  # its buffers have one dtype

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

        from ringmaster.techniques.parallel.buckets import (
            BufferPool,
            StaticAllGather,
            SummingReduceScatter,
        )

        model = super().parallelize(model, mesh, config)
        gather, reduce = StaticAllGather(BufferPool()), SummingReduceScatter(BufferPool(), exact=self.exact)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
        return model
