"""Distributed data parallel: one replica a device; gradients are averaged by all-reduce during backward.

Source: Li et al., PyTorch Distributed, VLDB 2020 (arXiv:2006.15704).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.job import DISTILLED, PRUNED
from ringmaster.techniques.technique import CONSECUTIVE, WHOLE, Config, DataParallel

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


class Ddp(DataParallel):
    """Holds a replica on each device, and averages gradients in buckets during the last micro-batch's backward."""

    name = "ddp"
    summary = "a replica a device, gradients averaged by all-reduce"
    needs = "two devices or more; the whole training state in each device's memory; a divisible batch"
    adaptations = frozenset({DISTILLED, PRUNED})
    reuses_layers = True
    base_of_group = WHOLE
    takes_packed_weights = True
    whole_tensors = True
    generates = True
    takes_chunks = CONSECUTIVE
    measures_noise = True
    takes_kernels = True

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Wraps the model in `DistributedDataParallel`; gradients are views of its communication buckets."""
        from torch.nn.parallel import DistributedDataParallel

        from ringmaster.techniques.training.exact_sums import BucketSums
        from ringmaster.techniques.training.gradients import average_in_half
        from ringmaster.techniques.training.recomputation import recompute_layers

        assert mesh is not None
        recompute_layers(model, config["recompute"])
        ddp = DistributedDataParallel(
            model,
            process_group=mesh.get_group(),
            gradient_as_bucket_view=True,
            find_unused_parameters=self.skips_layers,
        )
        if self.exact:
            self._sums = BucketSums(mesh.get_group())
            ddp.register_comm_hook(self._sums, lambda sums, bucket: sums.send(bucket))
        elif self.communication == "bf16":
            # A function without annotations, as DDP refuses those that are texts.
            ddp.register_comm_hook(mesh.get_group(), lambda group, bucket: average_in_half(group, bucket))
        return ddp

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Suppresses the exchange of gradients, except in the backward of the last micro-batch."""
        if is_last:
            return nullcontext()
        no_sync: AbstractContextManager[Any] = model.no_sync()  # type: ignore[operator]
        return no_sync

    def add_chunk(self, model: nn.Module, *, is_last: bool) -> None:
        """Adds a chunk to those before it; the backward of the last one has sent the sums."""
        from ringmaster.techniques.training.exact_sums import take_gradients

        if is_last:
            self._sums.finish()
        else:
            self._sums.tree.add(take_gradients(model.parameters()))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the attribute `module` of DDP's wrapper."""
        inner = model.module
        assert not isinstance(inner, str)
        return inner  # type: ignore[return-value]
