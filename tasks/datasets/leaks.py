"""Rows that are both trained on and evaluated on, found by the hashes of their contents."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.interface.data_source import Row
from ringmaster.techniques.runtime.data.rows import hash_bytes


@dataclass(frozen=True)
class Leaks:
    """Evaluated rows whose content is trained on. first: the place of the first of them, and of its like."""

    num_rows: int
    first: tuple[str, str]


@dataclass(frozen=True)
class RowPlaces:
    """The hashes and places of rows, 20 bytes each."""

    _hashes: bytearray = field(default_factory=bytearray)
    _files: array[int] = field(default_factory=lambda: array("I"))
    _numbers: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, row: Row, *, file: int) -> None:
        """Adds a row. file: the number of its file."""
        self._hashes.extend(hash_bytes(row.content))
        self._files.append(file)
        self._numbers.append(row.number)

    def __len__(self) -> int:
        return len(self._files)

    def hashes(self) -> NDArray[np.uint64]:
        """Returns the hashes, [rows]."""
        return np.frombuffer(bytes(self._hashes), dtype=np.uint64)

    def place(self, index: int, names: list[str]) -> str:
        """Returns the place of a row for messages."""
        return f"{names[self._files[index]]}, line {self._numbers[index]}"


@dataclass(frozen=True)
class SplitRows:
    """The rows of both splits. names: of the files."""

    training: RowPlaces
    held_out: RowPlaces
    names: list[str]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> SplitRows:
        """Collects rows, which are not kept themselves."""
        numbers: dict[str, int] = {}
        training, held_out = RowPlaces(), RowPlaces()
        for row in rows:
            (held_out if row.held_out else training).add(row, file=numbers.setdefault(row.file, len(numbers)))
        return cls(training, held_out, list(numbers))

    def leaks(self) -> Leaks | None:
        """Returns the evaluated rows that are trained on, or None."""
        trained, evaluated = self.training.hashes(), self.held_out.hashes()
        leaked = np.flatnonzero(np.isin(evaluated, trained))
        if not len(leaked):
            return None
        like = int(np.flatnonzero(trained == evaluated[leaked[0]])[0])
        places = self.held_out.place(int(leaked[0]), self.names), self.training.place(like, self.names)
        return Leaks(len(leaked), places)
