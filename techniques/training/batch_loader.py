"""Loads the batches of a job, those of coming steps ahead of time in a thread where loading takes long.

The samples of a step are known before it begins, so that the thread reads them while the present step is computed. Tiny
data in memory does not pay for it: a batch that is loaded quickly is loaded when it is needed.

What is loaded does not change. Samples that draw from the process's generators (of torch, numpy or Python) would
interfere with a model's draws. So the thread works only after the model's draws of a step are seeded and before the
next seeds. Where the generators have changed in between, that batch and all later ones are loaded when they are needed,
after their own seeds. So are batches whose loading fails in the thread: the error is raised at its own step, or does
not occur.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringmaster.techniques.data import Dataset, fetch
from ringmaster.techniques.training.dropout import torchs_own_draws

SLOW_S = 2e-3
"""The seconds of a load from which the next one is loaded ahead: many times those of handing it to a thread."""


@dataclass(frozen=True, kw_only=True)
class RowsRequest:
    """The samples of a batch, by index, and the width to which they are padded; None for the data set's own."""

    rows: tuple[int, ...]
    width: int | None = None


class BatchLoader:
    """Loads batches of one data set, and at most one batch ahead.

    pins: whether a batch that is loaded ahead is put into pinned memory, from which it is copied to a GPU while that
        computes.
    """

    def __init__(self, dataset: Dataset, *, pins: bool = False) -> None:
        self._dataset, self._pins = dataset, pins
        # Its thread ends with this object. It is not a process: the samples of a user's factory may hold what cannot be
        # pickled, CUDA cannot be forked, and shared memory is small in containers.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-loader")
        self._following: Iterator[RowsRequest] = iter(())
        self._ahead: tuple[RowsRequest, Future[tuple[dict[str, Tensor], float]]] | None = None
        self._num_slow = 0  # loads in succession
        self._is_thread_safe = True
        self._generators: Any = None  # their states when they were seeded last, where loads are slow

    @property
    def is_ahead(self) -> bool:
        """Whether batches are loaded ahead: two slow loads in succession, and nothing drawn in the second, allow it."""
        return self._is_thread_safe and self._num_slow > 1

    def begin_step(self, following: Iterator[RowsRequest]) -> None:
        """Begins a step. following: the batches from this step on, in the order in which `batch` will return them."""
        if self.is_ahead and self._ahead is None:
            self._following = following
            self.load_ahead()

    def batch(
        self,
        request: RowsRequest,
        *,
        seed: Callable[[], object] | None = None,
        seed_sample: Callable[[int], object] | None = None,
    ) -> dict[str, Tensor]:
        """Returns a batch: {name: [rows, ...]}. Raises what the data set raises.

        seed: seeds the generators for the batch. seed_sample: does so for each sample, by its place in the batch, where
            samples are read one at a time.
        """
        loaded = self._take(request)
        if seed is not None:
            seed()
        if loaded is None:

            def before_each(place: int) -> None:
                self._compare_generators()
                if seed_sample is not None:
                    seed_sample(place)
                if self._generators is not None:
                    self._generators = _generator_states()

            self._following = iter(())
            # The load after a slow one shows whether samples draw random numbers.
            self._generators = _generator_states() if self._num_slow == 1 and self._is_thread_safe else None
            loaded, seconds = self._load(request, before_each=before_each)
            self._compare_generators()
            self._num_slow = self._num_slow + 1 if seconds > SLOW_S else 0
        return loaded

    def load_ahead(self) -> None:
        """Loads the next batch in the thread where this pays. To be called when the model's draws have been seeded."""
        self._generators = _generator_states() if self.is_ahead else None
        if self.is_ahead and (request := next(self._following, None)) is not None:
            self._ahead = request, self._thread.submit(self._load, request, pins=self._pins)

    def settle(self) -> None:
        """Waits for the thread; to be called before data sets are read by other means, as they may share a file."""
        if self._ahead is not None:
            wait([self._ahead[1]])
            self._compare_generators()
        self._generators = None

    def _take(self, request: RowsRequest) -> dict[str, Tensor] | None:
        """Returns the batch that was loaded ahead; None where there is none, or it may differ."""
        if self._ahead is None:
            return None
        (loaded, loading), self._ahead = self._ahead, None
        wait([loading])
        self._compare_generators()
        self._is_thread_safe = self._is_thread_safe and loaded == request and loading.exception() is None
        if not self._is_thread_safe:
            return None
        batch, seconds = loading.result()
        self._num_slow = 2 if seconds > SLOW_S else 0
        return batch

    def _load(
        self, request: RowsRequest, *, before_each: Callable[[int], object] | None = None, pins: bool = False
    ) -> tuple[dict[str, Tensor], float]:
        """Returns a batch and the seconds that it took."""
        started_s = time.perf_counter()
        with torchs_own_draws():
            batch = fetch(self._dataset, request.rows, before_each=before_each, width=request.width)
        if pins:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch, time.perf_counter() - started_s

    def _compare_generators(self) -> None:
        if self._generators is not None and self._generators != _generator_states():
            self._is_thread_safe = False


def _generator_states() -> Any:
    _, key, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(key).tobytes(), rest
