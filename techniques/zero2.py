"""ZeRO stage 2, overlapped: whole weights on each device; gradients and optimizer state are divided.

Sources: Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.2; Megatron-LLaMA's OverlappedDistributedOptimizer.
`ringmaster.techniques.sharding.sharded` implements the exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.job import DISTILLED, Job
from ringmaster.techniques.technique import (
    GRADIENT_BYTES,
    INTERLEAVED,
    OPTIMIZER_STATE_BYTES,
    RECOMPUTE,
    WEIGHT_BYTES,
    WHOLE,
    Config,
    DataParallel,
    GangShape,
    micro_batches,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.checkpoints.state import Reader
    from ringmaster.techniques.model_facts import ModelFacts
    from ringmaster.techniques.sharding.sharded import ShardedModel

MIB = 1 << 20
# Smaller buckets are sent earlier, larger ones use the link better; only a trial shows which is quicker.
BUCKET_BYTES = (32 * MIB, 4 * MIB)
MAX_LIVE_BUCKETS = 3


class Zero2(DataParallel):
    """Reduces gradients to the ranks that update them during backward, and gathers updated weights during forward.

    Config keys, besides `micro_batch` and `recompute`; the default is in brackets:
    bucket_bytes: size of the flat buffers that are exchanged at once.
    every_micro_batch [False]: exchange gradients after each micro-batch rather than after the last. There are as many
        exchanges as micro-batches, but no rank ever holds more than its shard of the gradients and a few buckets.
    overlap [True]: False overlaps no exchange with computation, to measure what overlap gains.
    """

    name = "zero2"
    summary = "a replica a device, gradients and optimizer state divided, exchanged while computing"
    needs = "two devices or more; the weights and 1/n of gradients and optimizer state in each device's memory"
    adaptations = frozenset({DISTILLED})
    reuses_layers = True
    base_of_group = WHOLE
    takes_chunks = INTERLEAVED
    saves_memory_of = "ddp"

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields configs in which full recomputation, which saves memory, comes with gradients stored in shards.

        No bucket is larger than the model, except for the smallest bucket size.
        """
        rows = job.global_batch_size // gang.num_devices
        smaller = [size for size in BUCKET_BYTES if size < facts.parameter_bytes]
        for recompute in RECOMPUTE:
            for bucket_bytes in smaller or BUCKET_BYTES[-1:]:
                for micro_batch in micro_batches(job, num_slices=gang.num_devices):
                    config = {"micro_batch": micro_batch, "recompute": recompute, "bucket_bytes": bucket_bytes}
                    is_shared = recompute == "full" or job.is_exact
                    yield {**config, "every_micro_batch": is_shared and micro_batch < rows}

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of whole weights, a share of gradients and optimizer state, and the buckets in transfer.

        Gradients are whole where they wait for the last micro-batch.
        """
        share: float = 1 / gang.num_devices
        waits = config["micro_batch"] < job.global_batch_size // gang.num_devices
        whole = waits and not config.get("every_micro_batch", False)
        gradient_bytes = GRADIENT_BYTES * (1 + share if whole else share)
        of_trained = gradient_bytes + OPTIMIZER_STATE_BYTES[job.optimizer.name] * share
        live_bytes: int = min(MAX_LIVE_BUCKETS * config["bucket_bytes"], facts.num_updated * GRADIENT_BYTES)
        return int(facts.num_parameters * WEIGHT_BYTES + facts.num_updated * of_trained) + live_bytes

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Moves the weights into buckets and hooks the exchanges into forward and backward."""
        from ringmaster.techniques.sharding.sharded import ShardedModel
        from ringmaster.techniques.training.recomputation import recompute_layers

        assert mesh is not None
        recompute_layers(model, config["recompute"])
        return ShardedModel(
            model,
            mesh.get_group("dp_replicate"),
            bucket_bytes=config["bucket_bytes"],
            most_live_buckets=MAX_LIVE_BUCKETS,
            every_micro_batch=config.get("every_micro_batch", False),
            overlap=config.get("overlap", True),
            rounds=self.communication == "bf16",
            exact=self.exact,
        )

    def add_chunk(self, model: nn.Module, *, is_last: bool) -> None:
        """Does nothing, as the model's own context has added the chunk."""

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Returns the model's own context, which exchanges gradients."""
        return _sharded(model).micro_batch(is_last=is_last)

    def after_step(self, model: nn.Module) -> None:
        """Starts to gather the updated weights."""
        _sharded(model).gather_updates()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the inner model."""
        return _sharded(model).inner

    def gradient_divisor(self, mesh: DeviceMesh | None) -> int:
        """Returns 1, as gradients are summed, not averaged."""
        return 1

    def parameter_names(self, model: nn.Module) -> Mapping[nn.Parameter, str]:
        """Returns the name of the parameter that each shard is of."""
        return {part.weight: part.slot.name for part in _sharded(model).parameter_shards()}

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Returns |g| = sqrt(sum over ranks r of |g[r]|^2), where g[r] are the gradients of rank r's shards."""
        import torch.distributed as dist

        from ringmaster.techniques.training.gradients import global_norm

        return global_norm(parameters, group=dist.group.WORLD, exact=self.exact)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Returns whole parameters' state, each on one rank; the ranks gather the buckets one after another."""
        from ringmaster.techniques.sharding.sharded import gathered_state

        return gathered_state(_sharded(model), optimizer)

    def restore_optimizer(self, reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Loads this rank's shards of the optimizer state."""
        from ringmaster.techniques.sharding.sharded import restore_shards

        restore_shards(reader, _sharded(model), optimizer)

    def writes(self, name: str, tensor: Tensor, *, rank: int) -> bool:
        """Returns True for every optimizer tensor, as a rank holds only the optimizer state that it is to write."""
        return name.startswith("optimizer/") or super().writes(name, tensor, rank=rank)


def _sharded(model: nn.Module) -> ShardedModel:
    from ringmaster.techniques.sharding.sharded import ShardedModel

    assert isinstance(model, ShardedModel)
    return model
