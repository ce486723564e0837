"""`local_updates` of a job: optimizer steps that workers take on their own."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ringmaster.findings import Finding, Raw, are_counts, as_mapping, findings_where
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import MAX_WHOLE, Description, JobFeature, Limits, Positive, Whole, is_black_box


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(JobFeature):
    """Optimizer steps that workers take on their own, and an outer step on their mean after each round of them.

    A worker trains on its share of each global batch with its own optimizer. With a the weights at the start of a
    round, w_k those of worker k at its end, d = a - mean(w_k), mu the outer momentum and eta the outer learning rate:

        u <- mu u + d;    a <- a - eta (d + mu u)

    With eta = 1 and mu = 0 it is averaging. Source: Douillard et al., DiLoCo (arXiv:2311.08105).

    Attributes:
        workers: their number, which the gang's number of devices must divide.
        sync_every: the steps of a round. The last round ends with the job.
        outer_lr, outer_momentum: eta and mu.
        warmup_steps: the job's first steps, in which the gradient is averaged over all workers at each step.
    """

    key = "local_updates"
    description = (
        "exchanges between devices every few steps only, such as {workers: 4, sync_every: 32}, or leave the key out: "
        "at each step"
    )
    is_exact = True
    is_divisible = False
    group_obstacle = "has workers with steps of their own"

    workers: Annotated[Whole, Description("the number of workers, which share each global batch, such as 4")]
    sync_every: Annotated[Whole, Description("the steps of a worker between two exchanges, such as 32")]
    outer_lr: Annotated[Positive, Description("the outer learning rate; 1 averages")] = 1.0
    outer_momentum: Annotated[
        float, Limits(ge=0, lt=1), Description("the outer (Nesterov) momentum, such as 0.9; 0 for none")
    ] = 0.0
    warmup_steps: Annotated[
        int, Limits(ge=0, le=MAX_WHOLE), Description("the first steps, with an exchange at each, such as 128")
    ] = 0

    @property
    def num_workers(self) -> int:
        """The workers that have an optimizer each."""
        return self.workers

    @property
    def exchange_every(self) -> int:
        """The steps from one exchange to the next."""
        return self.sync_every

    def ends_round(self, step: int, *, num_steps: int) -> bool:
        """Returns whether the weights of all workers agree after `step` of `num_steps` steps."""
        return step <= self.warmup_steps or step == num_steps or (step - self.warmup_steps) % self.sync_every == 0

    def exchanges_a_step(self, *, num_steps: int) -> float:
        """Returns how many exchanges of all trained weights there are for each of `num_steps` steps, on average."""
        num_local = max(num_steps - self.warmup_steps, 0)
        return (num_steps - num_local + math.ceil(num_local / self.sync_every)) / max(num_steps, 1)

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields why workers cannot share a job's batches, or not in its steps."""
        local, place = as_mapping(job.get(cls.key)), (cls.key,)
        workers, warmup = local.get("workers"), local.get("warmup_steps", cls.warmup_steps)
        size, num_steps = job.get("global_batch_size", Job.global_batch_size), job.get("num_steps")
        yield from findings_where(
            (
                are_counts(size, workers) and size % workers > 0,
                (*place, "workers"),
                f"is {workers}, and global_batch_size {size} cannot be divided by it",
                "give a number that divides it",
            ),
            (
                bool(local.get("outer_momentum")) and not warmup,
                (*place, "outer_momentum"),
                "goes with a warm-up: without one it wrecks the first rounds",
                "give warmup_steps, such as 128, or leave it out",
            ),
            (
                are_counts(warmup, num_steps) and warmup >= num_steps,
                (*place, "warmup_steps"),
                f"is {warmup}, and the job has {num_steps} steps",
                "give fewer, or leave local_updates out",
            ),
            (
                bool(local) and is_black_box(job),
                place,
                "is for jobs that Ringmaster trains, not for commands",
                "leave it out",
            ),
        )


JOB_FEATURES = (LocalUpdates,)
