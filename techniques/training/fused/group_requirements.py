"""Which jobs can be trained together on one base, the mesh of their gang, and in which order. Imports no torch.

Where only some jobs of a group are trained at a time (`at_once`), the first ones start. The others wait in their order;
one joins whenever another ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapreplace
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import Effect
from ringmaster.techniques.job_specs import OF_WHOLE_TENSORS, DataSpec
from ringmaster.techniques.loss import loss_class
from ringmaster.techniques.metric import why_generating
from ringmaster.techniques.technique import batch_is_divisible

if TYPE_CHECKING:
    from ringmaster.techniques.model_facts import ModelFacts


AT_ONCE = "at_once"
"""The config key with the number of jobs trained at a time."""


def first_steps(num_steps: Sequence[int], *, at_once: int | None) -> list[int]:
    """Returns the step of the gang before which each job joins; `num_steps` are the jobs' remaining steps, in order."""
    ends = [0] * (at_once or len(num_steps))  # the last step of the newest job at each position
    return [heapreplace(ends, ends[0] + steps) for steps in num_steps]


def num_steps_of_gang(num_steps: Sequence[int], *, at_once: int | None) -> int:
    """Returns the number of the gang's steps until all jobs have ended."""
    firsts = first_steps(num_steps, at_once=at_once)
    return max((first + steps for first, steps in zip(firsts, num_steps, strict=True)), default=0)


def steps_taken(num_steps: Sequence[int], *, at_once: int | None, after: int) -> list[int]:
    """Returns how many of its steps each job has taken after `after` steps of the gang."""
    firsts = first_steps(num_steps, at_once=at_once)
    return [min(steps, max(0, after - first)) for first, steps in zip(firsts, num_steps, strict=True)]


NAME = "shared_base"
"""The technique that trains jobs together."""


def mesh_shape(num_ranks: int, config: Mapping[str, Any]) -> dict[str, int]:
    """Returns one axis over all ranks: `dp_shard` where the base is sharded, else `dp_replicate`."""
    return {"dp_shard" if config.get("base", "whole") == "sharded" else "dp_replicate": num_ranks}


def grouping_obstacle(jobs: Sequence[Job], facts: ModelFacts, *, num_ranks: int = 1) -> str | None:
    """Returns why these jobs cannot be trained together on one base, or None. `facts` describes their model."""
    for job in jobs:
        if reason := batch_is_divisible(job, num_ranks):
            return f"{job.name}: {reason}"
        if facts.computes_loss and job.loss is None:
            return f"{job.name} has a loss that its model computes on its own, for all rows of a batch at once"
        if reason := _why_not(job):
            return f"{job.name} {reason}"
    for job in jobs[1:]:
        if reason := pair_obstacle(jobs[0], job):
            return reason
    if facts.undivided:
        return f"trains what cannot be divided by samples ({facts.undivided})"
    if facts.has_dropout:
        return "the model drops out, and would draw another mask than alone"
    if facts.has_experts:
        return "the model routes tokens to experts, each of which would get rows of several jobs at once"
    if facts.whole_batch:
        return facts.whole_batch
    return None


def pair_obstacle(first: Job, job: Job) -> str | None:
    """Returns why two jobs that can be trained in groups cannot be trained in one group, or None."""
    if (job.model, job.base) != (first.model, first.base):
        return f"{job.name} has another base than {first.name}"
    if _model_features(job) != _model_features(first):
        return f"{job.name} has its base in another format than {first.name}"
    if job.precision != first.precision:
        return f"{job.name} is computed in another precision than {first.name}"
    if first.base is None and first.model.is_drawn and job.seed != first.seed:
        return f"{job.name} has another seed than {first.name}, and so another base"
    if _vocabulary(job.data) != _vocabulary(first.data):
        return f"{job.name} reads tokens of another vocabulary than {first.name}"
    return None


def _model_features(job: Job) -> tuple[object, ...]:
    """Returns the features of a job that change the model below its adapter, and the modules that they leave alone."""
    own = [feature for feature in job.features if Effect.MODEL in feature.effects]
    return (*own, *sorted(job.adapter.modules_to_save)) if own and job.adapter is not None else tuple(own)


def _vocabulary(data: DataSpec) -> DataSpec:
    """Returns the fields of `data` that determine how tokens are numbered, without those that select the tokens."""
    if data.tokenizer is not None:
        return DataSpec(tokenizer=data.tokenizer)
    of_batches = {name: getattr(DataSpec, name) for name in ("padding", "sampling")}
    return replace(
        data, seq_len=None, held_out=DataSpec.held_out, held_out_split=None, split=DataSpec.split, **of_batches
    )


def _why_not(job: Job) -> str | None:
    if job.techniques is not None and NAME not in job.techniques:
        return f"is to be trained by {', '.join(job.techniques)} alone"
    if job.adapter is None:
        return "trains no adapter"
    if job.adapter.dora or job.adapter.dropout or job.adapter.subtracts or job.adapter.kind == "prompt":
        return "has a DoRA, dropout, another start or a prompt, which is not computed for several adapters at once"
    if job.adapter.continues_base:
        return "continues from the adapter of its base, which is trained in the same batch"
    if obstacles := [each.group_obstacle for each in job.features if each.group_obstacle]:
        return obstacles[0]
    if job.exact:  # exact on a CPU, but on a GPU a product with more rows may sum in another order
        return "is exact: true, and what is trained together with it may change its last digits"
    if job.optimizer.name in OF_WHOLE_TENSORS:
        return f"is trained with {job.optimizer.name}, which needs whole matrices, and its parameters lie in rows"
    if job.optimizer.layer_decay is not None:
        return "has a learning rate for each layer"
    if job.compile:
        return "is compiled"
    if (loss := loss_class(job.loss)) is not None and not loss.per_token:
        return f"has the loss {loss.name}, which compares sequences, and here each row is alone"
    if (metric := why_generating(job.evaluation.metrics)) is not None:
        return f"has {metric}, which generates with the whole model alone"
    if job.data.packing:
        return "packs several samples into one row, and here rows are packed by job"
    if job.is_black_box:
        return "has a model that its command alone knows"
    return None
