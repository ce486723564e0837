"""The micro-batches of a job that one rank computes: which samples they have, and their loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringmaster.techniques.data import Dataset, Indices
from ringmaster.techniques.data.samples import Sampler
from ringmaster.techniques.job import Job
from ringmaster.techniques.training.batch_loader import BatchLoader, RowsRequest
from ringmaster.techniques.training.callbacks import StepPart, TrainerCallback
from ringmaster.techniques.training.rank_job import batch_width


@dataclass(kw_only=True)
class RankBatches:
    """The micro-batches of one rank.

    micro_batch: the rows of a forward pass, at most.
    width_divisor: what the width of padded samples must be divisible by.
    in_turn: whether a part of a step has every n-th micro-batch of the global batch, and not consecutive samples.
    callbacks: of the job, which may need the first micro-batches by themselves.
    """

    job: Job
    training: Dataset
    sampler: Sampler
    loader: BatchLoader
    micro_batch: int
    width_divisor: int
    in_turn: bool
    callbacks: Sequence[TrainerCallback]

    def samples(self, step: int) -> tuple[Indices, int | None]:
        """Returns the samples of a step, and the width to which they are padded."""
        indices = self.sampler.at(self.job.samples(step))
        return indices, self.width(self.training, indices)

    def width(self, dataset: Dataset, indices: Indices) -> int | None:
        """Returns the width to which the samples of a global batch are padded, the same on every rank."""
        return batch_width(self.job, dataset, indices, divisor=self.width_divisor)

    def places(self, step: int, part: StepPart) -> list[range]:
        """Returns the places in the global batch of the samples of each micro-batch of a part."""
        (number, num_parts), size, rows = part, self.job.phase(step).global_batch_size, self.micro_batch
        if self.in_turn:
            firsts = range(number * rows, size, num_parts * rows)
            return [range(first, first + rows) for first in firsts]
        part_size = size // num_parts
        if self.splits_first(step):
            rows = min(rows, -(-part_size // 2))
        first, end = number * part_size, (number + 1) * part_size
        return [range(start, min(start + rows, end)) for start in range(first, end, rows)]

    def splits_first(self, step: int) -> bool:
        """Returns whether a step has two micro-batches at least, and the first ones are exchanged by themselves."""
        return any(callback.splits_first(step) for callback in self.callbacks)

    def requests(self, steps: range, parts: Sequence[StepPart]) -> Iterator[RowsRequest]:
        """Yields what is loaded for the micro-batches of these parts, step by step."""
        for step in steps:
            indices, width = self.samples(step)
            for part in parts:
                for places in self.places(step, part):
                    yield RowsRequest(rows=tuple(int(indices[place]) for place in places), width=width)
