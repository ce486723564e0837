"""The order of samples: the global batch of a step is a function of (seed, step) alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Permutation = Callable[..., NDArray[np.int64]]


class Sampler:
    """The batches of one job among many.

    It has its own cache of the permutations in use, so that they are not computed again for each batch.
    """

    def __init__(self, *, num_samples: int, global_batch_size: int, seed: int) -> None:
        self._num_samples, self._size, self._seed = num_samples, global_batch_size, seed
        self._permutation = lru_cache(maxsize=2)(_permutation.__wrapped__)

    def indices(self, step: int) -> NDArray[np.int64]:
        """Returns the indices of the global batch of `step`, see `batch_indices`."""
        return batch_indices(
            num_samples=self._num_samples,
            global_batch_size=self._size,
            seed=self._seed,
            step=step,
            permutation=self._permutation,
        )


def batch_indices(
    *, num_samples: int, global_batch_size: int, seed: int, step: int, permutation: Permutation | None = None
) -> NDArray[np.int64]:
    """Returns the indices [global_batch_size] of the samples in the global batch of `step` (0-based).

    Batches are cut from an endless stream of per-epoch permutations of all samples. So every sample is seen once an
    epoch, for any batch size. A batch may extend over the end of an epoch, or over several epochs.
    """
    if num_samples < 1:
        raise ValueError("a batch cannot be drawn from no samples: the data set is empty")
    permuted = permutation or _permutation
    first = step * global_batch_size
    positions = np.arange(first, first + global_batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(positions, num_samples)
    batch = np.empty(global_batch_size, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        batch[here] = permuted(num_samples=num_samples, seed=seed, epoch=epoch)[offsets[here]]
    return batch


# Two, because a batch may extend from one epoch into the next.
@lru_cache(maxsize=2)
def _permutation(*, num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """All sample indices in the order of one epoch.

    They are sorted by raw draws. numpy promises that the stream of a bit generator is the same in every version, but
    does not promise this of `permutation`. So a job that resumes after an update sees the same batches.
    """
    draws = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(num_samples)
    return np.argsort(draws, kind="stable")
