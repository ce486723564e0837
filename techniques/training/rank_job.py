"""What a job owns on a rank, alone or in a group: its data, its step and its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ringmaster.codec import digest, from_json, to_json
from ringmaster.errors import CheckpointNotFound
from ringmaster.techniques.checkpoints.checkpoint import Checkpoint, CheckpointStore, folder_of
from ringmaster.techniques.checkpoints.state import read_whole
from ringmaster.techniques.data import Dataset, Indices, PreparedData, open_data, prepare, sampler_of, width_of
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import Effect, FirstCheckpoint
from ringmaster.techniques.processes.gang_events import CheckpointFailed, JobEvent, RowValues
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.technique import Technique
from ringmaster.techniques.training.batch_loader import BatchLoader
from ringmaster.techniques.training.bound_loss import BoundLoss
from ringmaster.techniques.training.callbacks import callbacks_of

Root = str | Path
"""A folder of checkpoints, or an fsspec URL."""

PHASES = "phases"
"""The key, in the metadata of checkpoints, of the list of `TrainingPhase` of a job that has changed its batch size."""

WIDTH_MULTIPLE = 8
"""The width of padded samples is a multiple of it, as kernels of matrix products prefer."""
LONGEST = "longest"


def batch_width(job: Job, dataset: Dataset, indices: Indices, *, divisor: int = 1) -> int | None:
    """Returns the width to which the samples of a global batch are padded; None for the data set's own.

    divisor: what the width must be divisible by.
    """
    # A compiled model would be compiled again for each width.
    if job.data.padding != LONGEST or job.compile:
        return None
    return width_of(dataset, indices, multiple_of=math.lcm(WIDTH_MULTIPLE, divisor))


def prepared_data(order: GangOrder) -> PreparedData:
    """Returns the prepared data of an order's job: the data that the order pins, where it does."""
    pinned = from_json(PreparedData, order.data) if order.data else None
    return prepare(order.data_spec, cache_dir=Path(order.cache_dir), pinned=pinned)


class RankJob:
    """A job on one rank, trained alone or in a group: its data, its step and its checkpoints.

    next_step: the number of completed steps.
    passed_over: newer checkpoints that were skipped as damaged.
    technique: of a job that is trained alone; None otherwise.
    callbacks: those of the job's features.
    """

    def __init__(self, order: GangOrder, ranks: RankContext, *, technique: Technique | None = None) -> None:
        self.order, self.ranks, self.technique = order, ranks, technique
        self.job = order.job if technique is None else technique.trained_job(order.job)
        self.prepared = prepared_data(order)
        cache = Path(order.cache_dir)
        self._training, self._held_out = open_data(self.job.data, cache_dir=cache, prepared=self.prepared)
        self._sampler = sampler_of(self.job, self._training)
        self._loader = BatchLoader(self._training, pins=ranks.device.type == "cuda")
        self.next_step = 0
        self.passed_over: tuple[str, ...] = ()
        self.callbacks = callbacks_of(self)

    def num_evaluated_rows(self, *, max_batches: int | None = None) -> int:
        """Returns the number of held-out rows of one evaluation, of at most `max_batches` global batches."""
        num_rows = min(len(self._held_out), self.job.max_evaluated_rows)
        return num_rows if max_batches is None else min(num_rows, max_batches * self.job.global_batch_size)

    def evaluated_rows(self, loss: BoundLoss) -> Sequence[int] | None:
        """Returns the numbers of the rows that an evaluation computes now, in their order; None for all."""
        chosen = (callback.evaluated_rows(loss, self.num_evaluated_rows()) for callback in self.callbacks)
        return next((rows for rows in chosen if rows is not None), None)

    def observe_rows(self, rows: RowValues | None) -> None:
        """Gives callbacks the values of the rows of an evaluation; None where it has computed all."""
        for callback in self.callbacks:
            callback.observe_rows(rows, self.num_evaluated_rows())

    def num_evaluated_batches(self) -> int:
        """Returns the number of global batches of one evaluation."""
        return -(-self.num_evaluated_rows() // self.job.global_batch_size)

    def store(self, root: Root) -> CheckpointStore:
        """Returns the checkpoints under `root`, which all ranks read and write together."""
        return CheckpointStore(
            root,
            rank=self.ranks.rank,
            num_ranks=self.ranks.num_ranks,
            agree=self.ranks.agree,
            keep=self.order.keep_checkpoints,
            attempt=self.order.attempt,
        )

    def newest_checkpoint(self, root: Root, *, known_step: int = 0) -> Checkpoint | None:
        """Returns the newest whole checkpoint under `root`.

        Raises ValueError where it belongs to a job that would train other weights. Raises CheckpointNotFound where
        there is none although one of `known_step` was stored.
        """
        store, start = self.store(root), self.order.first_checkpoint
        is_own = start is None or known_step > start.step
        checkpoint, self.passed_over = store.newest(known_step=known_step * is_own), tuple(store.passed_over)
        is_changed = str(root) in self.job.checkpoint_roots  # it was steered: `jobs set`
        if checkpoint is None and start is not None:
            return self._other_checkpoint(start)
        own = weights_digest(self.job, data_digest=self.prepared.digest)
        if (
            checkpoint is not None
            and not is_changed
            and (
                checkpoint.manifest.meta["weights_digest"] != own
                or checkpoint.manifest.meta.get(PHASES, ()) != self._phases(checkpoint.manifest.step)
            )
        ):
            raise ValueError(
                f"{checkpoint.location} is of another version of job {self.job.name}: its model, data, optimizer or "
                "seed changed since. To fix: give the job another name, or remove the folder to start it afresh"
            )
        return checkpoint

    def _other_checkpoint(self, start: FirstCheckpoint) -> Checkpoint:
        """Returns the checkpoint of another job that this one continues from."""
        checkpoint = self.store(start.checkpoints).whole(folder_of(start.step))
        if checkpoint is None:
            raise CheckpointNotFound(
                f"job {self.job.name} starts from step {start.step} in {start.checkpoints}, and no whole checkpoint is "
                "there. To fix: bring it back, or let the job begin without it"
            )
        return checkpoint

    def begin_segment(self, root: Root) -> None:
        """Begins a segment after the checkpoint under `root` that was restored, if any."""
        for callback in self.callbacks:
            callback.begin_segment(self, root)

    def first_events(self) -> Iterator[JobEvent]:
        """Yields the events that a segment reports at its beginning, such as damaged checkpoints that were skipped."""
        for folder in self.passed_over:
            what = f"checkpoint {folder} is damaged and was passed over"
            message = f"{what}: training continues from step {self.next_step}"
            yield CheckpointFailed(step=self.next_step, message=message)
        for callback in self.callbacks:
            yield from callback.events()

    def after_publish(self, step: int, *, is_last: bool) -> None:
        """Follows the publication of the checkpoint of `step`. Called on rank 0."""
        for callback in self.callbacks:
            callback.after_publish(step, is_last=is_last)

    def trained_weights(self, root: Root) -> dict[str, Tensor]:
        """Returns the whole tensors of the model in the newest checkpoint under `root`, which is of this step."""
        checkpoint = CheckpointStore(root).newest()
        assert checkpoint is not None and checkpoint.manifest.step == self.next_step
        return read_whole(checkpoint, prefix="model/")

    def model_meta(self, model: nn.Module) -> dict[str, Any]:
        """Returns the metadata that a checkpoint stores of the job and of the model that it trains."""
        config: Any = getattr(model, "config", None)  # a Hugging Face model's config, for converting the checkpoint
        as_json = json.loads(config.to_json_string(use_diff=False)) if hasattr(config, "to_json_string") else None
        tokenizer = self.prepared.tokenizer_dir and str(Path(self.prepared.tokenizer_dir).absolute())
        own = weights_digest(self.job, data_digest=self.prepared.digest)
        meta = {"job": self.job.name, "weights_digest": own, "config": as_json, "tokenizer_dir": tokenizer}
        return meta | ({PHASES: phases} if (phases := self._phases(self.next_step)) else {})

    def _phases(self, step: int) -> Sequence[Any]:
        """Returns the phases in which the first `step` steps were trained, beginning with that of the job as written.

        None are listed before the first change.
        """
        begun = [to_json(phase) for phase in self.job.phases if phase.first_step < step]
        return begun if len(begun) > 1 else ()

    def _to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor.to(self.ranks.device, non_blocking=True) for key, tensor in batch.items()}


def weights_digest(job: Job, *, data_digest: str) -> str:
    """Returns a digest of all that determines the job's weights: two jobs with one digest train the same model."""
    others = ("name", "techniques", "num_devices", "evaluation", "exact", "exact_chunk", "may_vary", PHASES)
    same = job.unaffected(Effect.WEIGHTS).union(others)
    if job.phases:  # they are compared by themselves
        job = replace(job.synchronous, num_steps=job.phases[0].num_steps)
    fields = {key: value for key, value in to_json(job).items() if key not in same}
    return digest({**fields, "data_digest": data_digest})
