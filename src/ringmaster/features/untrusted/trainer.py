"""Writes the chain of a job's states, by which a segment can be repeated elsewhere and compared."""

from __future__ import annotations

from pathlib import Path

from ringmaster.codec import to_json
from ringmaster.features.untrusted.job import Untrusted
from ringmaster.techniques.checkpoints.chain import ChainWriter, StateChain
from ringmaster.techniques.checkpoints.environment import present_environment
from ringmaster.techniques.processes.order import TRAIN
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback, TrainerContext
from ringmaster.techniques.training.rank_job import weights_digest


class StateChainCallback(TrainerCallback):
    """Adds a link to the chain after checkpoints, and digests of steps where untrusted nodes may train the job."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        self._writer: ChainWriter | None = None
        self._digests_steps = context.job.feature(Untrusted) is not None

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job is trained: the models of all jobs can be reproduced."""
        return context.order.purpose == TRAIN

    def begin_segment(self, context: JobContext, root: str | Path) -> None:
        """Starts the links of the segment, on rank 0."""
        order, data = context.order, context.prepared.digest
        if context.ranks.rank == 0:
            weights = weights_digest(context.job, data_digest=data)
            self._writer = ChainWriter.begin(
                root,
                chain=StateChain(job=to_json(order.job), weights=weights, data=data),
                step=context.next_step,
                digested_steps=order.digested_steps,
                environment=present_environment(
                    technique=order.technique,
                    config=order.config,
                    num_devices=order.num_devices,
                    device=context.ranks.device,
                    lists_all=order.job.runs_elsewhere,
                ),
            )

    def after_publish(self, step: int, *, is_last: bool) -> None:
        """Adds the link of the published checkpoint of `step`."""
        if self._writer is not None:
            self._writer.extend(step, always=is_last)

    def after_step(self, trainer: TrainerContext) -> None:
        """Takes a digest of the present state, where one is due."""
        if self._writer is not None and self._digests_steps:
            self._writer.digest_step(trainer.next_step, trainer.own_tensors())


TRAINER_CALLBACKS = (StateChainCallback,)
