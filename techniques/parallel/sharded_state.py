"""Converts optimizer state between shares of flat buckets and whole parameters, as checkpoints store them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.parallel.buckets import Bucket
from ringmaster.techniques.parallel.sharded import ShardedModel

# The name that torch's optimizers give to the only state with one value per parameter instead of per element.
STEP = "step"


def gathered_state(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's tensors by canonical name, in host memory, each on one rank only.

    All ranks must call it together. Bucket i is gathered on rank i modulo the number of ranks, one state of one bucket
    at a time. So no rank ever holds more than its part of the whole and one bucket.
    """
    model.wait_for_weights()
    rank, num_ranks = model.group.rank(), model.group.size()
    kept = _kept_anywhere(model, optimizer)
    named: dict[str, Tensor] = {}
    for i, bucket in enumerate(model.buckets):
        writer = i % num_ranks
        for key in sorted({key for slot in bucket.slots for key in kept.get(slot.name, {})} - {STEP}):
            whole = _gather(bucket, _shard_of_state(bucket, key, optimizer), model=model, writer=writer)
            if whole is not None:
                having = [slot for slot in bucket.slots if key in kept.get(slot.name, {})]
                named |= {f"optimizer/{slot.name}/{key}": slot.of(whole) for slot in having}
        if rank == writer:
            steps = {slot.name: kept[slot.name][STEP] for slot in bucket.slots if STEP in kept.get(slot.name, {})}
            named |= {f"optimizer/{name}/{STEP}": torch.tensor(step) for name, step in steps.items()}
    return named


def restore_shares(reader: Reader, model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Fills the state of this rank's shares from a checkpoint, reading one tensor at a time."""
    for share in model.all_shares():
        for key in reader.states_of(share.slot.name):
            value = reader.state(f"optimizer/{share.slot.name}/{key}", share.slot.parameter, optimizer)
            optimizer.state[share.weight][key] = value if key == STEP else share.of_parameter(value).clone()


def _kept_anywhere(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float | None]]:
    """The optimizer's states by parameter and name: the number of steps, None for tensors.

    The result is equal on all ranks. A rank knows only the states of its shares. Parameters that have got no gradient
    yet have no state.
    """
    mine: dict[str, dict[str, float | None]] = {
        share.slot.name: {key: float(value) if key == STEP else None for key, value in state.items() if _is_kept(value)}
        for share in model.all_shares()
        if (state := optimizer.state.get(share.weight))
    }
    of_ranks: list[Any] = [None] * model.group.size()
    dist.all_gather_object(of_ranks, mine, group=model.group)
    return {name: keys for of_rank in of_ranks for name, keys in of_rank.items()}


def _is_kept(value: Any) -> bool:
    return isinstance(value, Tensor)  # SGD without momentum has a state that is None


def _shard_of_state(bucket: Bucket, key: str, optimizer: torch.optim.Optimizer) -> Tensor:
    shard = torch.zeros_like(bucket.shard(bucket.weights))
    for share in bucket.shares:
        value = optimizer.state.get(share.weight, {}).get(key)
        if value is not None:
            share.of(shard).copy_(value)
    return shard


def _gather(bucket: Bucket, shard: Tensor, *, model: ShardedModel, writer: int) -> Tensor | None:
    """All ranks' shards, concatenated in the writer's host memory; None on other ranks."""
    if model.group.rank() != writer:
        dist.gather(shard, group=model.group, group_dst=writer)
        return None
    flat = torch.empty_like(bucket.weights)
    dist.gather(shard, list(flat.chunk(bucket.num_ranks)), group=model.group, group_dst=writer)
    return flat.cpu()
