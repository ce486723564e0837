"""A frozen base divided over ranks: each layer's weights are gathered when it computes, and nothing is reduced.

Source: Zhao et al., PyTorch FSDP (arXiv:2304.11277), of which frozen weights need the gathering alone.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ringmaster.techniques.engine.half import round_weights
from ringmaster.techniques.engine.models import layer_names


def shard(model: nn.Module, mesh: DeviceMesh, *, precision: str, unrounded: Collection[str] = ()) -> None:
    """Leaves of the base, on each rank of `mesh`, its share of every layer, and of what is in none. In place.

    precision: of the jobs; the weights of bf16-params are rounded here, as they cannot be afterwards,
    but for those of the modules `unrounded`.
    """
    model.requires_grad_(False)  # before they are divided: nobody makes room for gradients then
    if precision == "bf16-params":
        round_weights(model, but=unrounded)
    for name in layer_names(model):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
