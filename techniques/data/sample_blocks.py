"""Makes the samples of rows, some at a time, and writes them: divided into splits, packed if required, counted.

Packing puts several samples of a language model into one row, so that little of a batch is padding. Positions restart
at each sample of a row. By this, transformers' attention masks keep the samples apart. Source: Krell et al., Efficient
Sequence Packing without Cross-contamination (arXiv:2107.02027), of which this is first-fit decreasing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.errors import DataError
from ringmaster.techniques.data.arrays import (
    LABELS,
    POSITIONS,
    SPLITS,
    TOKENS,
    Array,
    ArrayWriter,
    ColumnWriter,
    RaggedArray,
    Sample,
    SampleArrays,
    SampleForm,
    with_mask,
)
from ringmaster.techniques.data.row_files import MAX_FAULTS, RowError, RowErrors
from ringmaster.techniques.data.row_kind import Columns, RowKind, SampleContext
from ringmaster.techniques.data.stored_source import TextProgress
from ringmaster.techniques.data_source import Row
from ringmaster.techniques.metric import IGNORED

ROWS_PER_CALL = 256
# How many rows after the first one without a sample are searched for others.
ROWS_AFTER_A_FAULT = 10_000


@dataclass(frozen=True, kw_only=True)
class SampleBlock:
    """The samples of consecutive rows.

    num_cut: how often something of a row was cut off, [rows].
    has_sample: whether a row has a sample, [rows]; not where no label is left of it.
    classes: the numbers of the classes of each row, where classes are found in the rows.
    """

    arrays: SampleArrays
    num_cut: NDArray[np.uint8]
    has_sample: NDArray[np.bool_]
    classes: RaggedArray | None = None


@dataclass(frozen=True)
class SampleError:
    """A row of which no sample can be made. place: among the rows. number: in its file. what: what is wrong."""

    place: int
    number: int
    what: str

    def of_file(self, file: str) -> RowError:
        """Returns the fault as it is reported."""
        return sample_error(file, self.number, self.what)


def sample_error(file: str, number: int, what: str) -> RowError:
    """Returns the fault of a row of which no sample can be made. what: what is wrong, and how to mend it."""
    problem, _, remedy = what.removeprefix(f"{file} ").partition(". To fix: ")
    return RowError(f"{file}, row {number}:", problem, remedy or "check the row")


class BlockMaker:
    """Makes the samples of rows.

    faults: the wrong rows are added to it, and have no samples; with None the first few of them raise `RowErrors`.
    """

    def __init__(
        self,
        kind: RowKind,
        *,
        columns: Columns,
        context: SampleContext,
        form: SampleForm,
        progress: TextProgress,
        faults: list[SampleError] | None = None,
    ) -> None:
        self._kind, self._columns, self._context = kind, columns, context
        self._form, self._progress, self._faults = form, progress, faults
        self._found: list[RowError] = []  # where they are to be raised
        self._num_rows = 0

    def blocks(self, rows: Iterable[Row]) -> Iterator[tuple[list[Row], SampleBlock]]:
        """Yields some rows after another, with their samples."""
        left = iter(rows)
        while chunk := self._next(left):
            block = self._block(chunk)
            if self._found:
                self._search(islice(left, ROWS_AFTER_A_FAULT))
                raise RowErrors(self._found[:MAX_FAULTS])
            yield chunk, block
            self._num_rows += len(chunk)

    def _next(self, rows: Iterator[Row]) -> list[Row]:
        """The next rows. Where one of them cannot be read, faults of those before it are reported with it."""
        chunk: list[Row] = []
        try:
            for row in islice(rows, ROWS_PER_CALL):
                chunk.append(row)
        except RowErrors as error:
            if chunk:
                self._block(chunk)
            raise RowErrors([*self._found, *error.faults][:MAX_FAULTS]) from error
        return chunk

    def _search(self, rows: Iterator[Row]) -> None:
        """Finds further faults in the rows after the first one."""
        while len(self._found) < MAX_FAULTS and (chunk := self._next(rows)):
            self._block(chunk)

    def _block(self, rows: Sequence[Row]) -> SampleBlock:
        by_role = [self._kind.values(row, self._columns, spec=self._context.spec) for row in rows]
        self._prefetch(by_role)
        made: list[Sample] = []
        num_cut, has_sample = np.zeros(len(rows), np.uint8), np.zeros(len(rows), bool)
        classes: list[list[int]] = [[] for _ in rows]
        found = self._context.found_classes
        for place, (row, values) in enumerate(zip(rows, by_role, strict=True)):
            num_cut_before = self._context.num_cut
            try:
                if found is not None and self._kind.label_role is not None:
                    classes[place] = found.add(values[self._kind.label_role])
                sample = self._sample(values)
            except DataError:
                raise
            except ValueError as error:
                self._refuse(SampleError(self._num_rows + place, row.number, str(error)), row.file)
                continue
            num_cut[place] = self._context.num_cut > num_cut_before
            if self._is_labelled(sample):
                has_sample[place] = True
                made.append(sample)
        arrays, is_cut = self._form.arrays(made)
        num_cut[has_sample] += is_cut
        return SampleBlock(
            arrays=arrays if self._kind.is_causal else with_mask(arrays),
            num_cut=num_cut,
            has_sample=has_sample,
            classes=None if found is None else RaggedArray.of([np.asarray(each, np.int32) for each in classes]),
        )

    def _prefetch(self, by_role: Sequence[Mapping[str, Any]]) -> None:
        """Encodes the texts of rows together, and reports them."""
        if not self._kind.needs_tokenizer:
            texts: list[list[str]] = [[] for _ in by_role]
        else:
            texts = [list(self._kind.texts_to_encode(row, spec=self._context.spec)) for row in by_role]
        for each in texts:
            self._progress.add(sum(map(len, each)), ends=True)
        if not self._kind.needs_tokenizer:
            return
        if self._kind.encodes_texts:
            self._context.tokenizer.prefetch(text for each in texts for text in each)
        else:
            self._context.tokenizer.learn([text for each in texts for text in each])

    def _sample(self, values: Mapping[str, Any]) -> Sample:
        made = self._kind.sample(values, context=self._context)
        return {name: np.asarray(value) for name, value in made.items()}

    def _is_labelled(self, sample: Sample) -> bool:
        """Whether a sample of a language model has labels: else it teaches nothing, and a batch has no mean loss."""
        if not self._kind.is_causal or LABELS not in sample:
            return True
        return bool((sample[LABELS][..., : self._form.max_length] != IGNORED).any(-1).all())

    def _refuse(self, fault: SampleError, file: str) -> None:
        if self._faults is None:
            self._found.append(fault.of_file(file))
        else:
            self._faults.append(fault)


ROWS_AT_ONCE = 64
"""About so many rows are packed together: enough for the last ones not to matter, and few enough for memory."""


class Packer:
    """Packs samples, in the order in which they are added, into rows of at most `width` tokens."""

    def __init__(self, *, width: int) -> None:
        self._width = width
        self._samples: list[Mapping[str, Array]] = []
        self._num_tokens = 0

    def add(self, samples: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """Takes samples, and returns the rows of those that suffice for `ROWS_AT_ONCE` rows, however many are taken.

        A sample has `input_ids`, [tokens], and may have `labels`; it is cut to `width`. Rows have both, and
        `position_ids`. The first label of a sample does not count, as the sample before it would predict it.

        Raises ValueError where samples have further arrays.
        """
        rows: list[dict[str, Array]] = []
        for sample in samples:
            if (others := sorted(sample.keys() - {TOKENS, LABELS})) or sample[TOKENS].ndim != 1:
                raise ValueError(
                    f"samples with {', '.join(others) or 'several rows'} cannot be packed. To fix: set packing to false"
                )
            self._samples.append(sample)
            self._num_tokens += self._length(sample)
            if self._num_tokens >= ROWS_AT_ONCE * self._width:
                rows += self.rest()
        return rows

    def rest(self) -> list[dict[str, Array]]:
        """Returns the rows of the samples that are left."""
        rows = [
            [self._samples[i] for i in row] for row in first_fit(list(map(self._length, self._samples)), self._width)
        ]
        self._samples, self._num_tokens = [], 0
        return [self._row(samples) for samples in rows]

    def _length(self, sample: Mapping[str, Array]) -> int:
        return min(len(sample[TOKENS]), self._width)

    def _row(self, samples: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        tokens = [sample[TOKENS][: self._width] for sample in samples]
        labels = [np.array(sample.get(LABELS, sample[TOKENS])[: self._width]) for sample in samples]
        for each in labels:
            each[:1] = IGNORED
        return {
            TOKENS: np.concatenate(tokens),
            LABELS: np.concatenate(labels),
            POSITIONS: np.concatenate([np.arange(len(each)) for each in tokens]),
        }


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


@dataclass(kw_only=True)
class SampleCounts:
    """What was written. num_samples: by split.

    longest: the length of the longest sample, after it was cut.
    num_truncated: the samples that were cut. num_left_out: those of which no label was left.
    """

    num_samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    longest: int = 0
    num_truncated: int = 0
    num_left_out: int = 0


class SampleWriter:
    """Writes samples into the columns of a `ColumnWriter`. packs: whether training samples are packed."""

    def __init__(self, writer: ColumnWriter, *, form: SampleForm, packs: bool) -> None:
        self.counts = SampleCounts()
        self._form, self._writers = form, {split: ArrayWriter(writer, form) for split in SPLITS}
        self._packer = Packer(width=form.max_length) if packs else None

    def add(self, block: SampleBlock, *, held_out: NDArray[np.bool_], wanted: NDArray[np.bool_] | None = None) -> None:
        """Writes the samples of rows. held_out: their split, [rows]. wanted: which rows are written, [rows]."""
        if wanted is None:
            wanted = np.ones(len(block.has_sample), bool)
        self.counts.num_left_out += int((wanted & ~block.has_sample).sum())
        self.counts.num_truncated += int(block.num_cut[wanted].sum())
        for split, of_split in (("training", wanted & ~held_out), ("held_out", wanted & held_out)):
            arrays = block.arrays.chosen(of_split[block.has_sample])
            tokens = (rows.lengths for name, rows in arrays.ragged.items() if name not in self._form.uncut)
            self.counts.longest = max([self.counts.longest, *(int(each.max(initial=0)) for each in tokens)])
            if self._packer is not None and split == "training":
                self._write_packed(self._packer.add([*arrays.each()]))
            else:
                self._write(split, arrays, num_samples=int(of_split[block.has_sample].sum()))

    def close(self) -> None:
        """Writes the samples that are still being packed."""
        if self._packer is not None:
            self._write_packed(self._packer.rest())

    def _write_packed(self, rows: Iterable[Sample]) -> None:
        samples = list(rows)
        arrays, _ = self._form.arrays(samples)
        self._write("training", arrays, num_samples=len(samples))

    def _write(self, split: str, arrays: SampleArrays, *, num_samples: int) -> None:
        if num_samples:
            self.counts.num_samples[split] += num_samples
            self._writers[split].append(split, arrays)
