"""Fully sharded data parallel (FSDP2): weights, gradients and optimizer state divided over the devices.

Sources: Rajbhandari et al., ZeRO stage 3 (arXiv:1910.02054); Zhao et al., PyTorch FSDP (arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from techniques.data_parallel import DataParallel
from techniques.job import Job
from techniques.technique import Config, GangShape, training_state_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from techniques.engine.models import ModelFacts


class Fsdp(DataParallel):
    """Each layer's weights are gathered for its forward and backward, its gradients reduced and scattered."""

    name = "fsdp"
    summary = "weights, gradients and optimizer state sharded; layers gathered when needed"
    needs = "two devices or more; 1/n of the training state and two whole layers in each device's memory"

    saves_memory_of = "ddp"
    moves_model = True
    # Layers kept gathered between forward and backward cost memory and save a gather: tried first.
    knobs = {"reshard": (False, True)}  # noqa: RUF012

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """One axis, over which batch and weights are divided alike."""
        return {"dp_shard": gang.num_devices}

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """A share of the state, and the gathered weights: two layers, or all where they are not resharded."""
        gathered = 2 * facts.largest_layer_bytes if config["reshard"] else facts.parameter_bytes
        return training_state_bytes(job, facts) // gang.num_devices + gathered

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Shards each layer, then what is left (embedding, norm, head) with the root."""
        from torch.distributed.fsdp import fully_shard

        from techniques.engine.models import layer_names
        from techniques.engine.recomputation import recompute_layers

        assert mesh is not None
        recompute_layers(model, config["recompute"])
        for name in layer_names(model):
            fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=config["reshard"])
        fully_shard(model, mesh=mesh, reshard_after_forward=False)  # in place: the model changes its class
        return model

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients stay whole on each rank until the last micro-batch, then they are reduced and scattered once."""
        return _gradient_sync(model, enabled=is_last)


@contextmanager
def _gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(enabled)  # type: ignore[operator]
    yield
