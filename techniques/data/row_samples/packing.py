"""Several samples of a language model in one row, so that little of a batch is padding.

Positions restart at each sample of a row. By this, transformers' attention masks keep the samples apart.

Source: Krell et al., Efficient Sequence Packing without Cross-contamination (arXiv:2107.02027), of which this is
first-fit decreasing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ringmaster.techniques.data.arrays import Array
from ringmaster.techniques.interface.metric import IGNORED

TOKENS, LABELS, POSITIONS = "input_ids", "labels", "position_ids"
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
