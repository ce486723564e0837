"""Loads the batches of a job, those of coming steps ahead of time in a thread where loading takes long.

The samples of a step are known before it begins, so that the thread reads them while the present step is computed. Tiny
data in memory does not pay for it: a batch that is loaded quickly is loaded when it is needed.

What is loaded does not change. Samples that draw from the process's generators (of torch, numpy or Python) would
interfere with a model's draws; so the generators are compared around each load, and where anything but a seed has
changed them, this batch and all later ones are loaded when they are needed, after the seeds that they have without a
thread. So are batches whose loading fails in the thread: the error is raised at its own step, or does not occur.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringmaster.techniques.data import Dataset, fetch
from ringmaster.techniques.training.dropout import torchs_own_draws

SLOW_S = 2e-3
"""The seconds of a load from which the next one is loaded ahead: many times those of handing it to a thread."""
MOST_BATCHES, MOST_BYTES = 16, 64 << 20  # that are loaded ahead, of which one may always be

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """The samples of a batch, by index, and the width to which they are padded; None for the data set's own."""

    rows: tuple[int, ...]
    width: int | None = None


class BatchLoader:
    """Loads batches of one data set.

    pins: whether batches that are loaded ahead are put into pinned memory, from which they are copied to a GPU while it
        computes.
    """

    def __init__(self, dataset: Dataset, *, pins: bool = False) -> None:
        self._dataset, self._pins = dataset, pins
        # Its thread ends with this object. It is not a process: the samples of a user's factory may hold what cannot be
        # pickled, CUDA cannot be forked, and shared memory is small in containers.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-loader")
        self._ahead: deque[tuple[BatchRequest, Future[tuple[Batch, float]]]] = deque()
        self._following: Iterator[BatchRequest] = iter(())
        self._num_slow, self._num_ahead = 0, 1  # slow loads in succession; batches to be loaded ahead
        self._is_thread_safe = True
        self._generators: Any = None  # their states when they were seeded last, where loads are slow

    def begin_step(self, following: Iterator[BatchRequest]) -> None:
        """Begins a step. following: the batches from this step on, in the order in which `batch` will return them."""
        if self._is_ahead and not self._ahead:
            self._following = following
            self._fill()

    def batch(
        self,
        request: BatchRequest,
        *,
        seed: Callable[[], object] | None = None,
        seed_sample: Callable[[int], object] | None = None,
    ) -> Batch:
        """Returns a batch: {name: [rows, ...]}. Raises what the data set raises.

        seed: seeds the generators for the batch. seed_sample: does so for each sample, by its place in the batch, where
            samples are read one at a time.
        """
        loaded = self._take(request)
        if seed is not None:
            seed()
        if loaded is not None:
            return loaded
        self._following = iter(())

        def before_each(place: int) -> None:
            self._compare_generators()
            if seed_sample is not None:
                seed_sample(place)
            self._note_generators()

        self._note_generators()
        loaded, seconds = self._load(request, before_each=before_each)
        self._compare_generators()
        self._num_slow = self._num_slow + 1 if seconds > SLOW_S else 0
        num_bytes = sum(tensor.nbytes for tensor in loaded.values())
        self._num_ahead = min(max(MOST_BYTES // max(num_bytes, 1), 1), MOST_BATCHES)
        return loaded

    def load_ahead(self) -> None:
        """Loads the following batches in the thread where this pays. To be called when the model's draws are seeded."""
        self._note_generators()
        self._fill()

    def settle(self) -> None:
        """Waits for the thread; to be called before data sets are read by other means, as they may share a file."""
        wait([loading for _, loading in self._ahead])
        self._compare_generators()
        self._generators = None

    @property
    def _is_ahead(self) -> bool:
        return self._is_thread_safe and self._num_slow > 1  # during the second one, generators were compared

    def _fill(self) -> None:
        if self._is_ahead:
            for request in islice(self._following, self._num_ahead - len(self._ahead)):
                self._ahead.append((request, self._thread.submit(self._load, request, pins=self._pins)))

    def _take(self, request: BatchRequest) -> Batch | None:
        """Returns a batch that was loaded ahead; None where it was not, or may differ."""
        if not self._ahead:
            return None
        loaded, loading = self._ahead.popleft()
        wait([loading])
        self._compare_generators()
        if not self._is_thread_safe or loaded != request or loading.exception() is not None:
            self._is_thread_safe = False
            for _, other in self._ahead:
                other.cancel()
            wait([other for _, other in self._ahead])
            self._ahead.clear()
            return None
        batch, seconds = loading.result()
        self._num_slow = 2 if seconds > SLOW_S else 0
        return batch

    def _load(
        self, request: BatchRequest, *, before_each: Callable[[int], object] | None = None, pins: bool = False
    ) -> tuple[Batch, float]:
        """Returns a batch and the seconds that it took."""
        started_s = time.perf_counter()
        with torchs_own_draws():
            batch = fetch(self._dataset, request.rows, before_each=before_each, width=request.width)
        if pins:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch, time.perf_counter() - started_s

    def _note_generators(self) -> None:
        watches = self._is_thread_safe and self._num_slow > 0
        self._generators = _generator_states() if watches else None

    def _compare_generators(self) -> None:
        if self._generators is not None and self._generators != _generator_states():
            self._is_thread_safe = False


def _generator_states() -> Any:
    _, key, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(key).tobytes(), rest
