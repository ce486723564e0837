"""Expert parallelism: each device holds some experts of each layer, and tokens travel to the experts chosen for them.

Source: Lepikhin et al., GShard (arXiv:2006.16668).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.fsdp import Fsdp
from ringmaster.techniques.job import Job
from ringmaster.techniques.technique import Config, GangShape, StepWork, training_state_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.model_facts import ModelFacts


class ExpertParallel(Fsdp):
    """Divides the batch and all weights as `fsdp`; weights of experts are never gathered, and tokens go to them."""

    name = "expert"
    summary = "as fsdp; each device keeps its experts, and tokens travel to them"
    needs = "two devices or more; a mixture of experts whose number they divide; 1/n of the training state"
    adaptations = frozenset()
    reuses_layers = False
    base_of_group = None
    takes_packed_weights = False
    takes_chunks = None
    measures_noise = False
    saves_memory_of = None

    def __init__(self) -> None:
        self._experts: list[nn.Parameter] = []

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires what `fsdp` does, and experts that can be divided equally."""
        if not facts.num_experts:
            return "is for mixtures of experts whose tensors hold one expert after another, such as Mixtral"
        if facts.num_experts % gang.num_devices:
            return f"{facts.num_experts} experts cannot be divided by {gang.num_devices} devices"
        if job.compile:
            return "compile: true, and how many tokens reach an expert is known only while the model runs"
        if facts.has_router_loss and job.loss is None and not facts.has_dropout:
            return super().supports(
                job, gang, replace(facts, whole_batch="")
            )  # it computes the loss of the whole batch
        return super().supports(job, gang, facts)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields the configs of `fsdp` with one copy of the weights, on the devices."""
        for config in super().configs(job, gang, facts):
            is_whole = config["micro_batch"] * gang.num_devices == job.global_batch_size
            if not {"num_replicas", "offload"} & set(config) and (is_whole or not facts.has_router_loss):
                yield config

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Returns one axis, which divides the batch, the experts and all other weights."""
        return {"dp_expert": gang.num_devices}

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the state shard, and of the gathered weights of layers without their experts."""
        experts_bytes = facts.expert_bytes // max(facts.num_layers, 1)
        ahead_bytes = (1 + config.get("prefetch", 1)) * max(facts.largest_layer_bytes - experts_bytes, 0)
        others_bytes = facts.parameter_bytes - facts.expert_bytes
        gathered_bytes = min(ahead_bytes, others_bytes) if config["reshard"] else others_bytes
        return training_state_bytes(job, facts) // gang.num_devices + gathered_bytes

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Divides the experts, then shards everything else as `fsdp`."""
        from ringmaster.techniques.sharding.experts import divide_experts, expert_modules, has_router_loss

        assert mesh is not None
        self._mesh, self._has_router_loss = mesh, has_router_loss(model)
        self._experts += [each for module in expert_modules(model) for each in divide_experts(module, mesh)]
        return super().parallelize(model, mesh, config)

    def _policies(self, mesh: DeviceMesh, config: Config) -> dict[str, Any]:
        return {**super()._policies(mesh, config), "ignored_params": set(self._experts)}

    def forward(self, model: nn.Module, batch: dict[str, Tensor], work: StepWork) -> Any:
        """Computes a loss with the routers' own part over the micro-batches of all ranks."""
        from ringmaster.techniques.sharding.experts import loss_of_whole_batch

        output = super().forward(model, batch, work)
        if self._has_router_loss and "labels" in work.inputs(batch):
            output.loss = loss_of_whole_batch(model, output, batch, self._mesh)
        return output

    def forward_backward(self, model: nn.Module, work: StepWork) -> tuple[Tensor, float]:
        """Runs the default step; experts that no token has reached get gradients of zeros."""
        result = super().forward_backward(model, work)
        self.fill_gradients()
        return result

    def fill_gradients(self) -> None:
        """Gives gradients of zeros to the trained experts that no token has reached."""
        import torch

        for parameter in self._experts:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
