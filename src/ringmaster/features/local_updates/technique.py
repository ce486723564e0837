"""Local updates: each worker takes optimizer steps on its own share of the batch; every few steps they are averaged.

The job defines the workers, and not the gang: a device holds one of them, or several in turn, with equal results.

Sources: Douillard et al., DiLoCo (arXiv:2311.08105); McMahan et al., Federated Averaging (arXiv:1602.05629).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.techniques.job import Job
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.single import Single
from ringmaster.techniques.technique import (
    OPTIMIZER_STATE_BYTES,
    RECOMPUTE,
    WEIGHT_BYTES,
    Config,
    GangShape,
    training_state_bytes,
    undivided_batch_only,
)

if TYPE_CHECKING:
    from ringmaster.techniques.model_facts import ModelFacts


class Local(Single):
    """Holds one or several of the job's workers on each device, which exchange weights at the ends of rounds only.

    `ringmaster.features.local_updates.trainer` takes the workers' steps.
    """

    name = "local"
    summary = "workers with optimizers of their own, averaged every few steps"
    needs = "a job with `local_updates`; devices that divide its workers; the state of these in each device's memory"
    adaptations = frozenset()
    reuses_layers = False
    generates = False
    takes_kernels = False
    measures_noise = False
    updates_locally = True

    def trained_job(self, job: Job) -> Job:
        """Returns the job with the local updates of its last phase."""
        return job.without(LocalUpdates).with_features(*job.phases[-1].features) if job.phases else job

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires that each device has equally many workers, and a batch that they may divide."""
        if (spec := job.feature(LocalUpdates)) is None:
            return f"{self.name} is for jobs with local_updates"
        if spec.workers % gang.num_devices:
            return f"{spec.workers} workers cannot be divided by {gang.num_devices} devices"
        loss = loss_function(job.loss, job.loss_options)
        if loss is not None and loss.total_names:
            return f"the loss {loss.name} counts over all workers at each step"
        return undivided_batch_only(job, facts)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields modes of recomputation; the micro-batch decides the bits, and so is the job's."""
        spec = job.feature(LocalUpdates)
        assert spec is not None
        micro_batch = job.exact_chunk or job.global_batch_size // spec.workers
        for recompute in RECOMPUTE:
            yield {"micro_batch": micro_batch, "recompute": recompute}

    def num_ranks(self, gang: GangShape) -> int:
        """Returns one for each device."""
        return gang.num_devices

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of one training state, and of each further worker's weights and optimizer state.

        Those of the last round's weights and of the outer momentum are added.
        """
        spec = job.feature(LocalUpdates)
        assert spec is not None
        more = spec.workers // gang.num_devices - 1
        of_worker = WEIGHT_BYTES + OPTIMIZER_STATE_BYTES[job.optimizer.name]
        of_rounds = WEIGHT_BYTES * (2 if spec.outer_momentum else 1)
        return training_state_bytes(job, facts) + facts.num_updated * (more * of_worker + of_rounds)
