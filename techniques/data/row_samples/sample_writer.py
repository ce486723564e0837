"""Writes the samples of rows: divided into splits, packed where that is asked for, and counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import SPLITS, ColumnWriter
from ringmaster.techniques.data.row_samples.packing import Packer
from ringmaster.techniques.data.row_samples.sample_arrays import ArrayWriter, Sample, SampleArrays, SampleForm
from ringmaster.techniques.data.row_samples.sample_blocks import SampleBlock


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
