"""Writes the samples of rows: cut to a length, packed where that is asked for, and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.arrays import Array, ColumnWriter
from ringmaster.techniques.runtime.data.row_samples.packing import Packer
from ringmaster.techniques.runtime.data.row_samples.ragged import RaggedWriter

Sample = Mapping[str, Array]


@dataclass(kw_only=True)
class SampleCounts:
    """What was written. num_samples: by split.

    longest: the length of the longest sample, after it was cut.
    num_truncated: the samples that were cut. num_left_out: those of which no label was left.
    """

    num_samples: dict[str, int] = field(default_factory=lambda: {"training": 0, "held_out": 0})
    longest: int = 0
    num_truncated: int = 0
    num_left_out: int = 0


class SampleWriter:
    """Writes samples into the columns of a `ColumnWriter`.

    what: the samples, in messages. ragged: the names of arrays whose last dimension differs; `uncut` are those of them
        that keep their length. max_length: the tokens to which the others are cut.
    packs: whether training samples are packed. needs_labels: whether a sample without labels is left out. It would
        teach nothing, and a batch of such samples has no mean loss.
    """

    def __init__(
        self,
        writer: ColumnWriter,
        *,
        what: str,
        ragged: frozenset[str],
        uncut: frozenset[str],
        max_length: int,
        packs: bool,
        needs_labels: bool,
    ) -> None:
        self.counts = SampleCounts()
        self._writer, self._ragged_writer, self._what = writer, RaggedWriter(writer), what
        self._ragged, self._uncut, self._max_length = ragged, uncut, max_length
        self._packer = Packer(width=max_length) if packs else None
        self._needs_labels = needs_labels

    def add(self, split: str, samples: Sequence[Sample]) -> None:
        """Writes samples of a split. Raises ValueError where their arrays have different shapes."""
        kept = [sample for sample in samples if self._is_labelled(sample)]
        self.counts.num_left_out += len(samples) - len(kept)
        for length in map(self._length, kept):
            self.counts.num_truncated += length > self._max_length
            self.counts.longest = max(self.counts.longest, min(length, self._max_length))
        if self._packer is not None and split == "training":
            self._write(split, self._packer.add([dict(sample) for sample in kept]))
        else:
            self._write(split, kept)

    def close(self) -> None:
        """Writes the samples that are still being packed."""
        if self._packer is not None:
            self._write("training", self._packer.rest())

    def _write(self, split: str, samples: Sequence[Sample]) -> None:
        self.counts.num_samples[split] += len(samples)
        if not samples:
            return
        try:
            for name, array in samples[0].items():
                rows = [sample[name] for sample in samples]
                if self._is_ragged(name, array):
                    most = None if name in self._uncut else self._max_length
                    self._ragged_writer.append(split, name, [row[..., :most] for row in rows], dtype=np.int32)
                else:
                    self._writer.append(split, {name: np.stack(rows)})
        except (ValueError, KeyError) as error:
            raise ValueError(f"{self._what} differ in shape: {error}. To fix: give all rows one shape") from error

    def _is_labelled(self, sample: Sample) -> bool:
        if not self._needs_labels or "labels" not in sample:
            return True
        return bool((sample["labels"][..., : self._max_length] != IGNORED).any(-1).all())

    def _length(self, sample: Sample) -> int:
        tokens = (name for name, array in sample.items() if self._is_ragged(name, array) and name not in self._uncut)
        return max((sample[name].shape[-1] for name in tokens), default=0)

    def _is_ragged(self, name: str, array: Array) -> bool:
        return name in self._ragged and array.ndim > 0 and array.dtype.kind in "biu"
