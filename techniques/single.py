"""Training in one process: the reference whose weights every other technique must reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.technique import (
    CONSECUTIVE,
    RECOMPUTE,
    Config,
    GangShape,
    Technique,
    micro_batches,
    undivided_batch_only,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.model_facts import ModelFacts


class Single(Technique):
    """Trains in one process on one GPU, or on all CPU slots of its gang with one thread for each of their cores."""

    name = "single"
    summary = "one process; on CPU slots one thread a core"
    needs = "one GPU, or CPU slots of one node; the whole training state in one device's memory"
    adaptations = frozenset({DISTILLED, PRUNED})
    reuses_layers = True
    takes_packed_weights = True
    whole_tensors = True
    generates = True
    takes_chunks = CONSECUTIVE
    measures_noise = True
    takes_kernels = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires one node, and one GPU at most, as one process cannot combine GPUs but can combine cores."""
        if gang.kind == "gpu" and gang.num_devices > 1:
            return "one process drives one GPU"
        if gang.num_nodes > 1:
            return "one process runs on one node"
        return None

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields fewer, larger micro-batches first; recomputation comes last, as it only serves to save memory."""
        if undivided_batch_only(job, facts):
            yield {"micro_batch": job.global_batch_size, "recompute": "none"}
            return
        for recompute in RECOMPUTE:
            for micro_batch in micro_batches(job):
                yield {"micro_batch": micro_batch, "recompute": recompute}

    def num_ranks(self, gang: GangShape) -> int:
        """Returns 1."""
        return 1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Applies recomputation; there is nothing else to lay out."""
        from ringmaster.techniques.training.recomputation import recompute_layers

        recompute_layers(model, config["recompute"])
        return model
