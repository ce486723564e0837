"""Sharding of a frozen base over ranks: each layer's weights are gathered when it computes; nothing is reduced.

Source: Zhao et al., PyTorch FSDP (arXiv:2304.11277). Frozen weights need only its all-gather.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ringmaster.techniques.models import layer_names
from ringmaster.techniques.training.half_precision import round_weights


def shard(model: nn.Module, mesh: DeviceMesh, *, precision: str, unrounded: Collection[str] = ()) -> None:
    """Shards the base in place over the ranks of `mesh`: every layer, and the parameters outside of the layers.

    precision: the jobs' precision. For bf16-params the weights are rounded here, which is not possible after sharding.
    unrounded: modules whose weights are not rounded.
    """
    model.requires_grad_(False)  # before sharding, so that no memory is allocated for gradients
    if precision == "bf16-params":
        round_weights(model, but=unrounded)
    for name in layer_names(model):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
