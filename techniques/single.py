"""One process: the reference that every other technique must equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.technique import (
    RECOMPUTE,
    Config,
    GangShape,
    Technique,
    micro_batches,
    undivided_batch_only,
    why_pinned,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.engine.models import ModelFacts


class Single(Technique):
    """One process on one GPU, or on all the CPU slots of its gang, with a thread for each of their cores."""

    name = "single"
    summary = "one process; on CPU slots one thread a core"
    needs = "one GPU, or CPU slots of one node; the whole training state in one device's memory"
    adaptations = frozenset({DISTILLED, PRUNED})

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """A GPU cannot be joined to another by one process; cores can."""
        if gang.kind == "gpu" and gang.num_devices > 1:
            return "one process drives one GPU"
        if gang.num_nodes > 1:
            return "one process runs on one node"
        if gang.num_devices > 1 and (reason := why_pinned(job)):
            return reason
        return None

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Fewer, larger micro-batches first; recomputation only where memory asks for it, so last."""
        if undivided_batch_only(job, facts):
            yield {"micro_batch": job.global_batch_size, "recompute": "none"}
            return
        for recompute in RECOMPUTE:
            for micro_batch in micro_batches(job.global_batch_size):
                yield {"micro_batch": micro_batch, "recompute": recompute}

    def num_ranks(self, gang: GangShape) -> int:
        """Always one."""
        return 1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Nothing to lay out."""
        from ringmaster.techniques.engine.recomputation import recompute_layers

        recompute_layers(model, config["recompute"])
        return model
