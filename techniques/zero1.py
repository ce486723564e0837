"""ZeRO stage 1: replicas as in DDP, with each parameter's optimizer state on one rank only.

Sources: Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.1; Megatron-LM's DistributedOptimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringmaster.techniques.ddp import Ddp
from ringmaster.techniques.job import Job
from ringmaster.techniques.technique import (
    GRADIENT_BYTES,
    OPTIMIZER_STATE_BYTES,
    WEIGHT_BYTES,
    Config,
    GangShape,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from ringmaster.techniques.model_facts import ModelFacts


class Zero1(Ddp):
    """Averages every gradient on every rank; only a parameter's owner updates it, then broadcasts it."""

    name = "zero1"
    summary = "a replica a device, gradients averaged by all-reduce, optimizer state divided"
    needs = "two devices or more; weights, gradients and 1/n of the optimizer state in each device's memory"
    saves_memory_of = "ddp"
    measures_noise = False  # no rank has all second moments

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of whole weights and gradients, and of a share of the optimizer state."""
        state_bytes = OPTIMIZER_STATE_BYTES[job.optimizer.name] / gang.num_devices
        return int(facts.num_parameters * WEIGHT_BYTES + facts.num_updated * (GRADIENT_BYTES + state_bytes))

    def optimizer_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Returns the parameters that this rank owns."""
        return [parameter for parameter, owner in _owned(model) if owner == _group(model).rank()]

    def after_step(self, model: nn.Module) -> None:
        """Broadcasts each updated parameter from its owner; all transfers run concurrently."""
        import torch.distributed as dist

        group = _group(model)
        works = [
            dist.broadcast(parameter.detach(), group=group, group_src=owner, async_op=True)
            for parameter, owner in _owned(model)
        ]
        for work in works:
            work.wait()

    def writes(self, name: str, tensor: Tensor, *, rank: int) -> bool:
        """Returns True for every optimizer tensor, as a rank holds the optimizer state of its own parameters only."""
        return name.startswith("optimizer/") or super().writes(name, tensor, rank=rank)


def owners(sizes: Sequence[int], *, num_ranks: int) -> list[int]:
    """Returns the owner of each parameter: largest first, each to the rank with the smallest load (Graham's LPT rule).

    The result is the same on every rank. The fullest rank has at most 4/3 of its load in the best division.
    """
    loads, owner_of = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner_of[index] = min(range(num_ranks), key=lambda rank: loads[rank])
        loads[owner_of[index]] += sizes[index]
    return owner_of


def _owned(model: nn.Module) -> list[tuple[nn.Parameter, int]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(zip(trained, owners([p.numel() for p in trained], num_ranks=_group(model).size()), strict=True))


def _group(model: nn.Module) -> ProcessGroup:
    from torch.nn.parallel import DistributedDataParallel

    assert isinstance(model, DistributedDataParallel)
    return model.process_group
