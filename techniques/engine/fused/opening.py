"""What a gang of a group begins with: the base, ready for adapters, and an order for each of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from ringmaster.techniques.adapters.leaves import own_leaves
from ringmaster.techniques.adapters.peft_format import resolved
from ringmaster.techniques.engine.data import PreparedData, prepare
from ringmaster.techniques.engine.fused.group import Group
from ringmaster.techniques.engine.fused.probing import packed_attention
from ringmaster.techniques.engine.fused.sharding import shard
from ringmaster.techniques.engine.fused.stem import Stem
from ringmaster.techniques.engine.models import build_model, model_facts
from ringmaster.techniques.engine.order import GangOrder
from ringmaster.techniques.engine.ranks import Ranks, join
from ringmaster.techniques.job import Job
from ringmaster.techniques.shared_base import SharedBase, why_not_together
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.values import from_json


def orders_of(order: GangOrder) -> list[GangOrder]:
    """An order for each job of a group, the leader's first: of the fellows' counts what is their own."""
    leader = replace(order, fellows=())
    return [leader] + [
        replace(
            leader,
            job=fellow.job,
            data=fellow.data,
            folder=fellow.folder,
            checkpoint_dir=fellow.checkpoint_dir,
            model_dir=fellow.model_dir,
            weights_from=fellow.weights_from,
            last_step=fellow.last_step,
            keep_checkpoints=fellow.keep_checkpoints,
        )
        for fellow in order.fellows
    ]


def join_group(order: GangOrder, rank: int) -> Ranks:
    """Meets the other ranks of a group's gang, where it has several."""
    slot = order.slots[0]
    shape = GangShape(kind=slot.kind, num_devices=order.num_devices, memory_bytes=slot.memory_bytes)
    technique = SharedBase()
    axes = technique.mesh_shape(shape, order.config)
    return join(order, rank, num_ranks=technique.num_ranks(shape), axes=axes)


def open_group(order: GangOrder, ranks: Ranks) -> Group:
    """The base of the order's job, on the ranks' devices, with nobody on it yet.

    Raises ValueError where the order's jobs cannot be trained together.
    """
    job, cache = order.job, Path(order.cache_dir)
    data = from_json(PreparedData, order.data) if order.data else prepare(job.data, cache_dir=cache)
    jobs = [job, *(fellow.job for fellow in order.fellows)]
    if reason := why_not_together(jobs, model_facts(job.model, data=data), num_ranks=ranks.num_ranks):
        raise ValueError(f"shared_base: {reason}. To fix: train it by itself")
    weights = Path(order.weights_from) if order.weights_from else None
    base = build_model(job.model, data=data, seed=job.seed, weights_from=weights)
    own = _own(base, jobs)
    attention = None
    if ranks.mesh is not None and order.config.get("base", "whole") == "sharded":
        attention = packed_attention(base)
        shard(base, ranks.mesh, precision=job.precision, unrounded=own)
    else:
        base = base.to(ranks.device)
    recompute = order.config.get("recompute", "none")
    return Group(Stem(base, recompute=recompute, unrounded=own, attention=attention), ranks=ranks)


def _own(base: nn.Module, jobs: Sequence[Job]) -> set[str]:
    """The modules of which any job trains weights of its own, which begin as the base's are."""
    found: set[str] = set()
    for job in jobs:
        assert job.adapter is not None
        with suppress(ValueError, OSError):  # which are told where the job is made
            found.update(own_leaves(base, resolved(job.adapter)))
    return found
