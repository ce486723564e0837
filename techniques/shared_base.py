"""Technique that trains several jobs together, as adapters of one frozen base; `runtime.fused` implements it.

Each job has its own data, steps and checkpoints, in the form that every technique uses. So a job may be trained alone
in one segment and beside other jobs in another.

Sources: Ye et al., mLoRA (arXiv:2312.02515); Sheng et al., S-LoRA (arXiv:2311.03285).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.interface.job import DataSpec, Job
from ringmaster.techniques.interface.technique import Config, GangShape, batch_is_divisible

if TYPE_CHECKING:
    from ringmaster.techniques.runtime.models import ModelFacts
    from ringmaster.techniques.runtime.processes.order import GangOrder
    from ringmaster.techniques.runtime.processes.reporter import Reporter

NAME = "shared_base"


class SharedBase(BlackBox):
    """Trains the job of an order and its member jobs, with one rank a device.

    A step of the gang is one step of each job. Over several devices, every job's batch is divided as `ddp` divides it.
    Adapters are whole on each device. Their gradients are summed without rounding, whatever the jobs' `communication`
    allows.

    Config keys, besides `recompute`; the default is in brackets:
    at_once [all]: number of jobs trained at a time; the others wait, and one joins whenever another has left.
    base ["whole"]: "whole" for a replica of the base on each device, or "sharded" for layers that are gathered when
        needed, as in `fsdp`.
    """

    name = NAME
    summary = "several adapters side by side on one copy of their base; the planner forms the groups"
    needs = "two jobs or more that adapt one base; of several devices, batches that they divide"

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Refuses every single job: the technique trains groups."""
        return "trains groups of jobs, not a single job"

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields activations stored or recomputed; on several devices, each with the base whole and sharded."""
        for base in [{}] if gang.num_devices == 1 else [{"base": "whole"}, {"base": "sharded"}]:
            for recompute in ("none", "full"):
                yield {"recompute": recompute, **base}

    def num_ranks(self, gang: GangShape) -> int:
        """Returns one rank a device."""
        return gang.num_devices

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Returns one axis over all ranks: `dp_shard` where the base is sharded, else `dp_replicate`."""
        return {"dp_shard" if config.get("base", "whole") == "sharded" else "dp_replicate": gang.num_devices}

    def profile(self, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
        """Measures the steps of all the order's jobs together."""
        from ringmaster.techniques.runtime.fused.trial_loop import profile

        return profile(order, reporter, rank=self.rank)

    def run(self, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
        """Trains each of the order's jobs to its own last step."""
        from ringmaster.techniques.runtime.fused.segment_loop import run

        return run(order, reporter, rank=self.rank)


def why_not_together(jobs: Sequence[Job], facts: ModelFacts, *, num_ranks: int = 1) -> str | None:
    """Returns why these jobs cannot be trained together on one base, or None. `facts` describes their model."""
    for job in jobs:
        if reason := batch_is_divisible(job, num_ranks):
            return f"{job.name}: {reason}"
        if facts.computes_loss and job.loss is None:
            return f"{job.name} has a loss that its model computes on its own, for all rows of a batch at once"
        if reason := _why_not(job):
            return f"{job.name} {reason}"
    first = jobs[0]
    for job in jobs[1:]:
        if (job.model, job.base) != (first.model, first.base):
            return f"{job.name} has another base than {first.name}"
        if job.precision != first.precision:
            return f"{job.name} is computed in another precision than {first.name}"
        if first.base is None and first.model.is_drawn and job.seed != first.seed:
            return f"{job.name} has another seed than {first.name}, and so another base"
        if _vocabulary(job.data) != _vocabulary(first.data):
            return f"{job.name} reads tokens of another vocabulary than {first.name}"
    if facts.undivided:
        return f"trains what cannot be divided by samples ({facts.undivided})"
    if facts.has_dropout:
        return "the model drops out, and would draw another mask than alone"
    if facts.has_experts:
        return "the model routes tokens to experts, each of which would get rows of several jobs at once"
    if facts.whole_batch:
        return facts.whole_batch
    return None


def _vocabulary(data: DataSpec) -> DataSpec:
    """Returns the fields of `data` that determine how tokens are numbered, without those that select the tokens."""
    if data.tokenizer is not None:
        return DataSpec(tokenizer=data.tokenizer)
    return replace(data, seq_len=None, held_out=DataSpec.held_out, held_out_split=None, split=DataSpec.split)


def _why_not(job: Job) -> str | None:
    if job.techniques is not None and NAME not in job.techniques:
        return f"is to be trained by {', '.join(job.techniques)} alone"
    if job.adapter is None:
        return "trains no adapter"
    if job.exact:  # exact on a CPU, but on a GPU a product with more rows may sum in another order
        return "is exact: true, and what is trained beside it may change its last digits"
    if job.adaptation is not None:
        return "is adapted in another way too"
    if job.compile:
        return "is compiled"
    if job.model.command is not None:
        return "has a model that its command alone knows"
    return None
