"""Samples as tensors, the order in which training reads them, and samples that are packed into rows.

Samples are read from Arrow files, one at a time or in batches, and padded where they differ in length. The global
batch of a step is a function of (seed, step) and of the samples' lengths alone (`Sampler`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data import arrow_files
from ringmaster.techniques.data_source import Dataset
from ringmaster.techniques.job import Job
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    import torch


Collate = Callable[[Mapping[str, arrow_files.Array]], "dict[str, torch.Tensor]"]
Sample = Mapping[str, arrow_files.Array]


@runtime_checkable
class BatchedDataset(Protocol):
    """A data set that returns many samples at once, stacked; a user's own data set may do so too."""

    def rows(self, indices: arrow_files.Indices, /) -> dict[str, torch.Tensor]:
        """Returns the samples of `indices`, each column stacked along dimension 0."""


class ArraySamples:
    """Samples in the rows of a table. collate: makes a batch of the columns of some rows."""

    def __init__(self, table: arrow_files.Table, *, collate: Collate) -> None:
        self._rows, self._collate, self._num_samples = arrow_files.TableRows(table), collate, int(table.num_rows)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int, /) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: column[0] for name, column in self.rows([index % len(self)]).items()}

    def rows(self, indices: arrow_files.Indices, /) -> dict[str, torch.Tensor]:
        """Returns the samples of `indices`, stacked: {name: [len(indices), ...]}."""
        table = self._rows(indices)
        return self._collate({name: np.array(arrow_files.values_of(table[name])[0]) for name in table.column_names})


class PaddedSamples(ArraySamples):
    """Samples with ragged columns, which are padded to one width.

    width: the width where `rows` is given none. padding: the values that fill up the columns. pads_left: whether they
        come first, and not last. uncut: the columns that
        are not tokens: they are padded to their longest row, and do not count in lengths. rounds_width: whether
        widths may be rounded up.
    """

    def __init__(
        self,
        table: arrow_files.Table,
        *,
        collate: Collate,
        width: int,
        padding: Mapping[str, int],
        uncut: Collection[str] = (),
        pads_left: bool = False,
        rounds_width: bool = True,
    ) -> None:
        super().__init__(table, collate=collate)
        self._table, self._padding, self._uncut, self.width = table, padding, uncut, width
        self._pads_left, self.rounds_width = pads_left, rounds_width

    def lengths(self) -> NDArray[np.int64]:
        """Returns the length of each sample, the longest of its columns: [samples]."""
        return lengths_of(self._table, uncut=self._uncut)

    def longest(self, indices: arrow_files.Indices) -> int:
        """Returns the length of the longest of some samples."""
        return int(lengths_of(self._rows(indices), uncut=self._uncut).max(initial=0))

    def rows(self, indices: arrow_files.Indices, /, *, width: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the samples of `indices`, stacked, with ragged columns padded to `width`."""
        table, plain, ragged = self._rows(indices), dict[str, arrow_files.Array](), dict[str, arrow_files.Array]()
        for name in table.column_names:
            values, lengths = arrow_files.values_of(table[name])
            if lengths is None:
                plain[name] = np.array(values)
            else:
                widest = int(lengths.max(initial=1)) if name in self._uncut else width or self.width
                fill = self._padding.get(name, 0)
                ragged[name] = arrow_files.padded(values, lengths, width=widest, fill=fill, pads_left=self._pads_left)
        return self._collate({**plain, **ragged})


def lengths_of(table: arrow_files.Table, *, uncut: Collection[str] = ()) -> NDArray[np.int64]:
    """Returns the length of each row, the longest of its ragged columns without those of `uncut`: [rows]."""
    result = np.zeros(table.num_rows, dtype=np.int64)
    for name in (field.name for field in table.schema if arrow_files.is_ragged(field) and field.name not in uncut):
        lengths = [np.diff(np.from_dlpack(rows.offsets)) for rows in table[name].chunks]
        result = np.maximum(result, np.concatenate([result[:0], *lengths]))
    return result


def as_tensors(columns: Mapping[str, arrow_files.Array], *, copies_labels: bool = True) -> dict[str, torch.Tensor]:
    """Returns columns as tensors.

    Integers become int64. A column `pixel_values` of bytes becomes float32 in -1..1.

    copies_labels: whether `input_ids` without `labels` are their own labels: a language model's loss shifts them.
    """
    import torch

    batch = {name: torch.from_numpy(_values(name, column)) for name, column in columns.items()}
    if copies_labels and "input_ids" in batch:
        batch.setdefault("labels", batch["input_ids"])
    return batch


@runtime_checkable
class PaddedDataset(BatchedDataset, Protocol):
    """A data set whose samples differ in length, and are padded to one width when they are read."""

    width: int

    def lengths(self) -> NDArray[np.int64]:
        """Returns the length of each sample, [samples]."""

    def longest(self, indices: arrow_files.Indices, /) -> int:
        """Returns the length of the longest of some samples."""

    def rows(self, indices: arrow_files.Indices, /, *, width: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the samples of `indices`, padded to `width`; None for the data set's own."""


def width_of(dataset: Dataset, indices: arrow_files.Indices, *, multiple_of: int) -> int | None:
    """Returns the width to which the samples of a batch are padded: the longest one's, rounded up.

    It is at most the data set's own width, whatever `multiple_of` is. None where samples are not padded.
    """
    if not isinstance(dataset, PaddedDataset):
        return None
    multiple = multiple_of if getattr(dataset, "rounds_width", True) else 1
    return min(-(-dataset.longest(indices) // multiple) * multiple, dataset.width)


def num_tokens_of(batch: Mapping[str, torch.Tensor]) -> int:
    """Returns the number of input tokens of a batch: those of its mask, without padding, or all where it has none.

    0 where the samples are not tokens, such as images and speech.
    """
    if "input_values" in batch or "input_features" in batch:
        return 0
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else 0


def fetch(
    dataset: Dataset,
    indices: arrow_files.Indices,
    *,
    before_each: Callable[[int], object] | None = None,
    width: int | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the samples of `indices` as one batch: {name: [len(indices), ...]}.

    before_each: called before each sample is read, with its position in `indices`, if samples are read one at a time.
    width: the number of tokens to which the samples of a `PaddedDataset` data set are padded; None for its own.
    """
    if width is not None and isinstance(dataset, PaddedDataset):
        return dataset.rows(indices, width=width)
    if isinstance(dataset, BatchedDataset):
        return dataset.rows(indices)
    from torch.utils.data import default_collate

    samples = []
    for place, index in enumerate(indices):
        if before_each is not None:
            before_each(place)
        samples.append(dataset[int(index)])
    return cast("dict[str, torch.Tensor]", default_collate(samples))


def _values(name: str, rows: arrow_files.Array) -> arrow_files.Array:
    if name == "pixel_values" and rows.dtype == np.uint8:
        return rows.astype(np.float32) / np.float32(127.5) - np.float32(1)
    if rows.dtype.kind in "iu":
        return rows.astype(np.int64)
    return np.asarray(rows, dtype=np.float32) if rows.dtype == np.float64 else np.asarray(rows)


LENGTH_GROUPED = "length-grouped"
MAX_GROUPED_BATCHES = 50
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

    def indices(self, step: int) -> NDArray[np.int64]:
        """Returns the indices [global_batch_size] of the samples in the global batch of `step` (0-based)."""
        return self.at(range(step * self._size, (step + 1) * self._size))

    def at(self, places: Sequence[int]) -> NDArray[np.int64]:
        """Returns the indices of the samples at some places of the stream."""
        epochs, offsets = np.divmod(np.asarray(places, dtype=np.int64), self._num_samples)
        batch = np.empty(len(places), dtype=np.int64)
        for epoch in map(int, np.unique(epochs)):
            here = epochs == epoch
            batch[here] = self._order_of(epoch)[offsets[here]]
        return batch

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = np.argsort(_draws(self._num_samples, self._seed, epoch), kind="stable")
        if self._lengths is None:
            return order
        begun = -epoch * self._num_samples % self._size  # the samples that fill up the last epoch's last batch
        draws = _draws(self._num_samples // self._size + 1, self._seed, epoch, 1)
        rest = grouped(order[begun:], lengths=self._lengths, batch_size=self._size, draws=draws)
        return np.concatenate([order[:begun], rest])


class StreamOrder(Sampler):
    """The batches of a data set that is a stream itself, whose sample i is the one at place i."""

    def at(self, places: Sequence[int]) -> NDArray[np.int64]:
        """Returns the places."""
        return np.asarray(places, dtype=np.int64)


def sampler_of(job: Job, dataset: Dataset) -> Sampler:
    """Returns the batches of a job over its training samples."""
    if getattr(dataset, "is_stream", False):
        return StreamOrder(num_samples=len(dataset), global_batch_size=job.global_batch_size, seed=job.seed)
    lengths = None
    if job.data.sampling == LENGTH_GROUPED and isinstance(dataset, PaddedDataset):
        lengths = dataset.lengths()
    return Sampler(num_samples=len(dataset), global_batch_size=job.global_batch_size, seed=job.seed, lengths=lengths)


def grouped(
    order: NDArray[np.int64], *, lengths: NDArray[np.int64], batch_size: int, draws: NDArray[np.uint64]
) -> NDArray[np.int64]:
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
    size = batch_size * min(max(num_batches // 4, 1), MAX_GROUPED_BATCHES)
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


ROWS_AT_ONCE = 64
"""About so many rows are packed together: enough for the last ones not to matter, and few enough for memory."""


def packed(samples: Iterable[Sample], *, width: int) -> Iterator[list[Sample]]:
    """Packs samples, in their order, into rows of at most `width` tokens; yields about `ROWS_AT_ONCE` rows at a time.

    Little of a batch is then padding. A sample has `input_ids`, [tokens], and may have `labels`; it is cut to `width`.
    Rows have both, and `position_ids`, which restart at each sample of a row. By this, transformers' attention masks
    keep the samples apart. The first label of a sample does not count, as the sample before it would predict it.
    Source: Krell et al., Efficient Sequence Packing without Cross-contamination (arXiv:2107.02027): first-fit
    decreasing.

    Raises ValueError where samples have further arrays.
    """
    waiting: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        if (others := sorted(sample.keys() - {arrow_files.TOKENS, arrow_files.LABELS})) or sample[
            arrow_files.TOKENS
        ].ndim != 1:
            raise ValueError(
                f"samples with {', '.join(others) or 'several rows'} cannot be packed. To fix: set packing to false"
            )
        waiting.append({name: values[:width] for name, values in sample.items()})
        num_tokens += len(waiting[-1][arrow_files.TOKENS])
        if num_tokens >= ROWS_AT_ONCE * width:
            yield _packed_rows(waiting, width)
            waiting, num_tokens = [], 0
    if waiting:
        yield _packed_rows(waiting, width)


def _packed_rows(samples: Sequence[Sample], width: int) -> list[Sample]:
    rows: list[Sample] = []
    for row in first_fit([len(sample[arrow_files.TOKENS]) for sample in samples], width):
        tokens = [samples[i][arrow_files.TOKENS] for i in row]
        labels = [np.array(samples[i].get(arrow_files.LABELS, samples[i][arrow_files.TOKENS])) for i in row]
        for each in labels:
            each[:1] = IGNORED
        positions = [np.arange(len(each)) for each in tokens]
        rows.append(
            {
                arrow_files.TOKENS: np.concatenate(tokens),
                arrow_files.LABELS: np.concatenate(labels),
                arrow_files.POSITIONS: np.concatenate(positions),
            }
        )
    return rows


def first_fit(sizes: Sequence[int], width: int) -> list[list[int]]:
    """Returns rows of indices, each of at most `width` in total: the largest first, each in the first row with room.

    Each size must be at most `width`.
    """
    rows: list[list[int]] = []
    room = np.zeros(len(sizes), dtype=np.int64)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = np.flatnonzero(room[: len(rows)] >= sizes[index])
        if len(fitting):
            at = int(fitting[0])
        else:
            at = len(rows)
            rows.append([])
            room[at] = width
        rows[at].append(index)
        room[at] -= sizes[index]
    return rows
