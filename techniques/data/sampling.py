"""The order of samples: the global batch of a step is a function of (seed, step) and of the samples' lengths alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.samples import Padded
from ringmaster.techniques.interface.data_source import Dataset
from ringmaster.techniques.interface.job import Job

Indices = NDArray[np.int64]

LENGTH_GROUPED = "length-grouped"
MOST_GROUPED_BATCHES = 50
"""The most batches whose samples are sorted by length together, as in transformers' trainer."""


class Sampler:
    """The batches of one job.

    Batches are cut from an endless stream of per-epoch orders of all samples. So every sample is seen once an epoch,
    for any batch size. A batch may extend over the end of an epoch, or over several epochs.

    It has its own cache of the orders in use, so that they are not computed again for each batch.

    lengths: the samples' lengths, [num_samples]; each batch then has samples of similar length, see `grouped`. None for
        a random order.
    """

    def __init__(
        self, *, num_samples: int, global_batch_size: int, seed: int, lengths: NDArray[np.int64] | None = None
    ) -> None:
        if num_samples < 1:
            raise ValueError("a batch cannot be drawn from no samples: the data set is empty")
        self._num_samples, self._size, self._seed, self._lengths = num_samples, global_batch_size, seed, lengths
        # Two, because a batch may extend from one epoch into the next.
        self._order_of = lru_cache(maxsize=2)(self._order)

    def indices(self, step: int) -> Indices:
        """Returns the indices [global_batch_size] of the samples in the global batch of `step` (0-based)."""
        first = step * self._size
        epochs, offsets = np.divmod(np.arange(first, first + self._size, dtype=np.int64), self._num_samples)
        batch = np.empty(self._size, dtype=np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            batch[here] = self._order_of(epoch)[offsets[here]]
        return batch

    def _order(self, epoch: int) -> Indices:
        order = np.argsort(_draws(self._num_samples, self._seed, epoch), kind="stable")
        if self._lengths is None:
            return order
        begun = -epoch * self._num_samples % self._size  # the samples that fill up the last epoch's last batch
        draws = _draws(self._num_samples // self._size + 1, self._seed, epoch, 1)
        rest = grouped(order[begun:], lengths=self._lengths, batch_size=self._size, draws=draws)
        return np.concatenate([order[:begun], rest])


def sampler_of(job: Job, dataset: Dataset) -> Sampler:
    """Returns the batches of a job over its training samples."""
    lengths = None
    if job.data.sampling == LENGTH_GROUPED and isinstance(dataset, Padded):
        lengths = dataset.lengths()
    return Sampler(num_samples=len(dataset), global_batch_size=job.global_batch_size, seed=job.seed, lengths=lengths)


@lru_cache(maxsize=2)
def _sampler(num_samples: int, global_batch_size: int, seed: int) -> Sampler:
    return Sampler(num_samples=num_samples, global_batch_size=global_batch_size, seed=seed)


def batch_indices(*, num_samples: int, global_batch_size: int, seed: int, step: int) -> Indices:
    """Returns the indices [global_batch_size] of the samples in the global batch of `step`, in random order."""
    return _sampler(num_samples, global_batch_size, seed).indices(step)


def grouped(order: Indices, *, lengths: NDArray[np.int64], batch_size: int, draws: NDArray[np.uint64]) -> Indices:
    """Returns a random order such that each batch has samples of similar length. The longest of all is the first.

    As in transformers' LengthGroupedSampler, the samples of up to 50 batches are sorted by length together. Unlike
    there, batches then come in random order, so that a measurement of the first steps holds for later ones.

    order: the samples, in random order. lengths: of all samples, by index. draws: one or more a whole batch.
    """
    num_batches = len(order) // batch_size
    if not num_batches:
        return order
    order = order.copy()
    longest = int(np.argmax(lengths[order]))
    order[[0, longest]] = order[[longest, 0]]  # it must not be among the samples that fill no batch
    # At least four groups, so that an epoch does not repeat the batches of the last one.
    size = batch_size * min(max(num_batches // 4, 1), MOST_GROUPED_BATCHES)
    whole, rest = order[: num_batches * batch_size], order[num_batches * batch_size :]
    by_length = np.lexsort((-lengths[whole], np.arange(len(whole)) // size))
    batches = whole[by_length].reshape(num_batches, batch_size)
    batches = np.concatenate([batches[:1], batches[1:][np.argsort(draws[: num_batches - 1], kind="stable")]])
    return np.concatenate([batches.ravel(), rest])


def _draws(number: int, *seed: int) -> NDArray[np.uint64]:
    """Raw draws, which numpy promises to be the same in every version; it does not promise this of `permutation`.

    So a job that resumes after an update sees the same batches.
    """
    return np.random.PCG64(np.random.SeedSequence([each % 2**64 for each in seed])).random_raw(number)
