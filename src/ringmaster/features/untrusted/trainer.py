"""Writes the chain of a job's states, by which a segment can be repeated elsewhere and compared."""

from __future__ import annotations

from pathlib import Path

from ringmaster.codec import to_json
from ringmaster.features.untrusted.job import Untrusted
from ringmaster.techniques.checkpoints.chain import ChainWriter, StateChain
from ringmaster.techniques.checkpoints.environment import present_environment
from ringmaster.techniques.processes.order import TRAIN
from ringmaster.techniques.training.callbacks import TrainedModel, TrainerCallback, TrainingState
from ringmaster.techniques.training.job_state import weights_digest


class StateChainCallback(TrainerCallback):
    """Adds a link to the chain after checkpoints, and digests of steps where untrusted nodes may train the job."""

    def __init__(self, state: TrainingState) -> None:
        super().__init__(state)
        self._writer: ChainWriter | None = None
        self._digests_steps = state.job.feature(Untrusted) is not None

    @classmethod
    def is_for(cls, state: TrainingState) -> bool:
        """Returns whether the job is trained: the models of all jobs can be reproduced."""
        return state.order.purpose == TRAIN

    def begin_segment(self, state: TrainingState, root: str | Path) -> None:
        """Starts the links of the segment, on rank 0."""
        order, data = state.order, state.prepared.digest
        if state.ranks.rank == 0:
            weights = weights_digest(state.job, data_digest=data)
            self._writer = ChainWriter.begin(
                root,
                chain=StateChain(job=to_json(order.job), weights=weights, data=data),
                step=state.next_step,
                digested_steps=order.digested_steps,
                environment=present_environment(
                    technique=order.technique,
                    config=order.config,
                    num_devices=order.num_devices,
                    device=state.ranks.device,
                    lists_all=order.job.runs_elsewhere,
                ),
            )

    def after_publish(self, step: int, *, is_last: bool) -> None:
        """Adds the link of the published checkpoint of `step`."""
        if self._writer is not None:
            self._writer.extend(step, always=is_last)

    def after_step(self, trainer: TrainedModel) -> None:
        """Takes a digest of the present state, where one is due."""
        if self._writer is not None and self._digests_steps:
            self._writer.digest_step(trainer.next_step, trainer.own_tensors())


TRAINER_CALLBACKS = (StateChainCallback,)
