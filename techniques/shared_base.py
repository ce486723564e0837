"""Technique that trains several jobs together, as adapters of one frozen base; `training.fused` implements it.

Each job has its own data, steps and checkpoints, in the form that every technique uses. So a job may be trained alone
in one segment and together with other jobs in another.

Sources: Ye et al., mLoRA (arXiv:2312.02515); Sheng et al., S-LoRA (arXiv:2311.03285).
"""

from collections.abc import Iterator

from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.job import Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.gang_events import JobResult
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.technique import Config, GangShape
from ringmaster.techniques.training.fused.group_requirements import NAME, mesh_shape


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
        return mesh_shape(gang.num_devices, config)

    def profile(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Measures the steps of all the order's jobs together."""
        from ringmaster.techniques.training.fused.group import profile

        return profile(order, reporter, rank=self.rank)

    def run(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Trains each of the order's jobs to its own last step."""
        from ringmaster.techniques.training.fused.group_loop import run

        return run(order, reporter, rank=self.rank)
