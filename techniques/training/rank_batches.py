"""The micro-batches of a job that one rank computes: which samples they have, and their loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringmaster.techniques.data import Dataset, Indices
from ringmaster.techniques.data.samples import Sampler
from ringmaster.techniques.job import Job
from ringmaster.techniques.training.batch_loader import BatchLoader, RowsRequest
from ringmaster.techniques.training.callbacks import Share, TrainerCallback
from ringmaster.techniques.training.job_state import batch_width


@dataclass(kw_only=True)
class RankBatches:
    """The micro-batches of one rank.

    micro_batch: the rows of a forward pass, at most.
    width_divisor: what the width of padded samples must be divisible by.
    in_turn: whether a share has every n-th micro-batch of the global batch, and not consecutive samples.
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

    def places(self, step: int, share: Share) -> list[range]:
        """Returns the places in the global batch of the samples of each micro-batch of a share."""
        (index, num_shares), size, rows = share, self.job.phase(step).global_batch_size, self.micro_batch
        if self.in_turn:
            firsts = range(index * rows, size, num_shares * rows)
            return [range(first, first + rows) for first in firsts]
        share_size = size // num_shares
        if self.splits_first(step):
            rows = min(rows, -(-share_size // 2))
        first, end = index * share_size, (index + 1) * share_size
        return [range(start, min(start + rows, end)) for start in range(first, end, rows)]

    def splits_first(self, step: int) -> bool:
        """Returns whether a step has two micro-batches at least, and the first ones are exchanged by themselves."""
        return any(callback.splits_first(step) for callback in self.callbacks)

    def requests(self, steps: range, shares: Sequence[Share]) -> Iterator[RowsRequest]:
        """Yields what is loaded for the micro-batches of these shares, step by step."""
        for step in steps:
            indices, width = self.samples(step)
            for share in shares:
                for places in self.places(step, share):
                    yield RowsRequest(rows=tuple(int(indices[place]) for place in places), width=width)
