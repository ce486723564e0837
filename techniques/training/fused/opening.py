"""The start of a group's gang: joins the ranks, builds the shared base, and makes an order for each job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from ringmaster.codec import from_json
from ringmaster.techniques.data import PreparedData, prepare
from ringmaster.techniques.interface.job import Job
from ringmaster.techniques.models import build_model, model_facts
from ringmaster.techniques.models.adapters.leaves import own_leaves
from ringmaster.techniques.models.adapters.peft_format import resolved
from ringmaster.techniques.runtime.processes.order import GangOrder
from ringmaster.techniques.runtime.processes.ranks import Ranks, join
from ringmaster.techniques.training.fused.base.sharding import shard
from ringmaster.techniques.training.fused.base.shared_base import Stem
from ringmaster.techniques.training.fused.group import Group
from ringmaster.techniques.training.fused.probing import packed_attention
from ringmaster.techniques.training.fused.requirements import mesh_shape, why_not_together


def orders_of(order: GangOrder) -> list[GangOrder]:
    """An order for each job of a group, the lead job's first.

    The fields that belong to a job alone come from the member's order; all others come from the lead job's.
    """
    lead = replace(order, members=())
    return [lead] + [
        replace(
            lead,
            job=member.job,
            data=member.data,
            folder=member.folder,
            checkpoint_dir=member.checkpoint_dir,
            model_dir=member.model_dir,
            model_url=member.model_url,
            weights_from=member.weights_from,
            last_step=member.last_step,
            keep_checkpoints=member.keep_checkpoints,
        )
        for member in order.members
    ]


def join_group(order: GangOrder, rank: int) -> Ranks:
    """Joins the other ranks of a group's gang, if there are any."""
    num_ranks = order.num_devices  # one a device
    return join(order, rank, num_ranks=num_ranks, axes=mesh_shape(num_ranks, order.config))


def open_group(order: GangOrder, ranks: Ranks) -> Group:
    """The group of an order: the base of its job on the ranks' devices, without members yet.

    Raises ValueError if the order's jobs cannot be trained together.
    """
    job, cache = order.job, Path(order.cache_dir)
    pinned = from_json(PreparedData, order.data) if order.data else None
    data = prepare(job.data, cache_dir=cache, pinned=pinned)
    jobs = [job, *(member.job for member in order.members)]
    if reason := why_not_together(jobs, model_facts(job.model, data=data), num_ranks=ranks.num_ranks):
        raise ValueError(f"shared_base: {reason}. To fix: train it alone")
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
    """The names of the modules of which any job trains weights of its own, which start as copies of the base's."""
    found: set[str] = set()
    for job in jobs:
        assert job.adapter is not None
        with suppress(ValueError, OSError):  # raised again, and reported, when the job's member is created
            found.update(own_leaves(base, resolved(job.adapter)))
    return found
