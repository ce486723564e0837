"""Arrays of many samples, and how they are stored: those that differ in length as one stream of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ringmaster.techniques.data.arrays import Array, ColumnWriter
from ringmaster.techniques.data.row_samples.ragged import Ragged, RaggedWriter

TOKENS, MASK, LABELS = "input_ids", "attention_mask", "labels"

Sample = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class SampleArrays:
    """Arrays of samples by name: those that differ in length, and those of one shape, [samples, ...]."""

    ragged: Mapping[str, Ragged]
    plain: Mapping[str, Array]

    def chosen(self, samples: NDArray[np.bool_]) -> SampleArrays:
        """Returns those of some samples."""
        return SampleArrays(
            ragged={name: rows.chosen(samples) for name, rows in self.ragged.items()},
            plain={name: rows[samples] for name, rows in self.plain.items()},
        )

    def each(self) -> Iterator[Sample]:
        """Yields those of each sample."""
        columns = {**{name: rows.rows() for name, rows in self.ragged.items()}, **self.plain}
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def with_mask(arrays: SampleArrays) -> SampleArrays:
    """Returns arrays with a mask of tokens where there is none: all tokens of a sample are read."""
    ragged, plain = dict(arrays.ragged), dict(arrays.plain)
    if MASK in ragged or MASK in plain:
        return arrays
    if TOKENS in ragged:
        tokens = ragged[TOKENS]
        ragged[MASK] = Ragged(np.ones(tokens.values.shape, np.uint8), tokens.lengths)
    elif TOKENS in plain:
        plain[MASK] = np.ones(plain[TOKENS].shape, np.uint8)
    return SampleArrays(ragged=ragged, plain=plain)


@dataclass(frozen=True, kw_only=True)
class SampleForm:
    """How samples are stored.

    what: the samples, in messages. ragged: the names of arrays whose last dimension differs; `uncut` are those of them
        that keep their length. max_length: the tokens to which the others are cut.
    has_indicators_of_found_classes: whether a label that is a list of numbers is as long as the number of classes that
        were known by then.
    """

    what: str
    ragged: frozenset[str]
    uncut: frozenset[str]
    max_length: int
    has_indicators_of_found_classes: bool = False

    def arrays(self, samples: Sequence[Sample]) -> tuple[SampleArrays, NDArray[np.bool_]]:
        """Returns the arrays of samples, and which samples were cut. Raises ValueError where names or shapes differ."""
        ragged, plain = dict[str, Ragged](), dict[str, Array]()
        is_cut = np.zeros(len(samples), bool)
        try:
            for name, first in samples[0].items() if samples else ():
                rows = [sample[name] for sample in samples]
                if self._is_ragged(name, first):
                    too_long = [self._is_cut(name, first) and row.shape[-1] > self.max_length for row in rows]
                    if any(too_long):
                        is_cut |= too_long
                        rows = [row[..., : self.max_length] for row in rows]
                    ragged[name] = Ragged.of(rows, dtype=_stored_dtype(first))
                else:
                    plain[name] = np.stack(rows)
            if len(samples) and (others := set().union(*samples) - samples[0].keys()):
                raise KeyError(min(others))
        except (ValueError, KeyError, IndexError) as error:
            raise self.refused(error) from error
        return SampleArrays(ragged=ragged, plain=plain), is_cut

    def refused(self, error: Exception) -> ValueError:
        """Returns what is to be raised for samples that differ."""
        return ValueError(f"{self.what} differ in shape: {error}. To fix: give all rows one shape")

    def _is_cut(self, name: str, array: Array) -> bool:
        return name not in self.uncut and array.dtype.kind != "f"

    def _is_ragged(self, name: str, array: Array) -> bool:
        is_of_classes = self.has_indicators_of_found_classes and name == LABELS
        # An empty list becomes an array of floats.
        is_whole = array.dtype.kind in "biu" or array.size == 0
        return name in self.ragged and array.ndim > 0 and (is_whole or is_of_classes)


class ArrayWriter:
    """Appends the arrays of samples to the columns of a `ColumnWriter`."""

    def __init__(self, writer: ColumnWriter, form: SampleForm) -> None:
        self._writer, self._ragged, self._form = writer, RaggedWriter(writer), form
        self._names: tuple[frozenset[str], frozenset[str]] | None = None

    def append(self, split: str, arrays: SampleArrays) -> None:
        """Appends arrays to a split. Raises ValueError where their names or shapes are others than before."""
        names = frozenset(arrays.ragged), frozenset(arrays.plain)
        if names == (frozenset(), frozenset()):
            return
        try:
            if self._names is not None and names != self._names:
                raise KeyError(min({*names[0], *names[1]} ^ {*self._names[0], *self._names[1]}, default=LABELS))
            self._names = names
            for name, rows in arrays.ragged.items():
                self._ragged.append(split, name, rows)
            self._writer.append(split, arrays.plain)
        except (ValueError, KeyError) as error:
            raise self._form.refused(error) from error


def _stored_dtype(array: Array) -> DTypeLike:
    """32 bits for tokens, which Python makes numbers of 64, and for empty lists, which numpy makes floats of 64."""
    is_given = array.dtype.kind in "iuf" and array.dtype.itemsize < (8 if array.dtype.kind == "f" else 4)
    return array.dtype if is_given else np.dtype(np.int32)
