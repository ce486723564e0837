"""Spilling: layers live in host memory and visit the device in slices; the next slice is copied during computation.

Sources: FairScale's OffloadModel; Pudipeddi et al., L2L (arXiv:2002.05645); Nagrecha, Hydra (arXiv:2110.08633).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.technique import (
    CONSECUTIVE,
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    Config,
    GangShape,
    StepWork,
    Technique,
    micro_batches,
    training_state_bytes,
    undivided_batch_only,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.model_facts import ModelFacts

FEW_SLICES = 4


class Offload(Technique):
    """Keeps weights, gradients and optimizer state in host memory, and two slices of the layers on one device."""

    name = "offload"
    summary = "one device, the layers in host memory and on the device a slice at a time"
    needs = "one GPU; a model with repeated layers; the whole training state in host memory"
    adaptations = frozenset({DISTILLED, PRUNED})
    whole_tensors = True
    takes_chunks = CONSECUTIVE
    saves_memory_of = "single"
    moves_model = True
    divides_layers = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires repeated layers to cut between, and enough host memory for the whole training state."""
        if gang.num_devices > 1:
            return "one process drives one device"
        if facts.num_layers < 2:
            return "the model has no repeated layers between which it could be cut into slices"
        if job.compile:
            return "compile: true, and a compiled layer would not let its weights go"
        if gang.kind == "cpu" and self.name not in (job.techniques or ()):
            return "a CPU slot's device memory is the host's, so nothing is saved (name it in techniques to use it)"
        if job.is_exact and gang.kind == "gpu":
            return "the host's cores run the optimizer, and round its last bits otherwise than a GPU does"
        needed, there = self.estimate_host_memory(job, facts), host_memory_bytes()
        if needed > there:
            return f"needs {needed / 2**30:.1f} GiB of host memory, and this machine has {there / 2**30:.1f}"
        return None

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields few, large micro-batches first, then configs that need less memory.

        Each micro-batch fetches all weights twice.
        """
        counts = list(dict.fromkeys((min(FEW_SLICES, facts.num_layers), facts.num_layers)))
        undivided = undivided_batch_only(job, facts) is not None
        sizes = micro_batches(job, at_most=1 if undivided else 3)
        for recompute, on_host in (("none", False), ("full", False), ("full", True)):
            if recompute == "full" and undivided:  # a second forward would count the batch twice
                continue
            for micro_batch in sizes:
                for num_slices in counts:
                    yield {
                        "micro_batch": micro_batch,
                        "recompute": recompute,
                        "num_slices": num_slices,
                        "host_activations": on_host,
                    }

    def updates_on_host(self, config: Config) -> bool:
        """Returns True."""
        return True

    def num_ranks(self, gang: GangShape) -> int:
        """Returns 1."""
        return 1

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of two slices' weights and one layer's gradients.

        For a CPU slot the bytes in host memory are added, as they lie in the same memory.
        """
        layer, outside = _layer_and_outside_bytes(facts)
        num_slices: int = config["num_slices"]
        layers_a_slice = -(-facts.num_layers // num_slices)
        on_device = 2 * max(layers_a_slice * layer, outside) + max(layer, outside)
        return on_device + (self.estimate_host_memory(job, facts) if gang.kind == "cpu" else 0)

    def host_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the whole training state for a GPU, and 0 for a CPU slot."""
        return self.estimate_host_memory(job, facts) if gang.kind == "gpu" else 0

    def estimate_host_memory(self, job: Job, facts: ModelFacts) -> int:
        """Returns the bytes of the training state and of the gradients that a backward has just returned."""
        return training_state_bytes(job, facts) + facts.num_updated * GRADIENT_BYTES

    def on_host(self) -> Iterator[Tensor]:
        """Returns the gradients that a backward has returned."""
        return self._spilled.returned()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Cuts the model into slices; its parameters stay in host memory."""
        from ringmaster.techniques.sharding.spilling import HostOffload

        self._spilled = HostOffload(
            model,
            num_slices=config.get("num_slices", FEW_SLICES),
            recompute=config["recompute"] == "full",
            host_activations=config.get("host_activations", False),
        )
        return model

    def forward(self, model: nn.Module, batch: dict[str, Tensor], work: StepWork) -> Any:
        """Runs the forward on the device that holds the batch."""
        self._spilled.bind(work.zero().device)
        return super().forward(model, batch, work)

    @contextmanager
    def accumulate(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Waits after each backward until its gradients are in host memory, before another backward starts."""
        yield
        self._spilled.settle()

    def after_step(self, model: nn.Module) -> None:
        """Discards the weights on the device, which are older than the optimizer's step."""
        self._spilled.forget()


def host_memory_bytes() -> int:
    """Returns the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _layer_and_outside_bytes(facts: ModelFacts) -> tuple[int, int]:
    """Returns the bytes of one layer's weights, and of the largest module outside the layers.

    Both are approximate where the layers are unequal.
    """
    largest, weights = facts.largest_layer_bytes, facts.num_parameters * WEIGHT_BYTES
    layers_are_largest = largest * facts.num_layers <= weights
    layer = largest if layers_are_largest else (weights - largest) // facts.num_layers
    outside = weights - layer * facts.num_layers
    if facts.decoder is not None:  # embedding and head are separate slices
        outside = min(outside, facts.decoder.vocab_size * facts.decoder.hidden_size * WEIGHT_BYTES)
    return layer, outside
