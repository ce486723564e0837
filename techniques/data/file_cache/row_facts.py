"""What is kept of each row of a file beside its samples: from this, splits and windows are chosen."""

from __future__ import annotations

import hashlib
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import open_columns
from ringmaster.techniques.data.file_rows import DataFile, moment_of, split_key
from ringmaster.techniques.data.manifest import ManifestBuilder
from ringmaster.techniques.data.rows import format_of
from ringmaster.techniques.interface.data_source import Row
from ringmaster.techniques.interface.job import DataSpec

SPLIT = "training"  # columns belong to a split; in what is kept, all rows are in one


@dataclass(frozen=True)
class RowFacts:
    """Facts of the rows of a file, [rows] each.

    hashes: of the contents. positions: between 0 and 2**64, by which a share is held out. held_out: 1 where a row is
    held out whatever its position is. moments: seconds since the epoch; NaN where no window asks for the time.
    """

    hashes: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    held_out: NDArray[np.uint8]
    moments: NDArray[np.float64]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the facts that are kept in a folder."""
        columns = open_columns(folder, SPLIT)
        return cls(*(np.array(columns[name]) for name in ("hashes", "positions", "held_out", "moments")))

    def __len__(self) -> int:
        return len(self.hashes)

    def are_held_out(self, file: DataFile, spec: DataSpec) -> NDArray[np.bool_]:
        """Returns which rows are held out; where a share of them is, by their content as `splits.is_held_out` does."""
        if file.held_out is not None:
            return np.full(len(self), file.held_out)
        if format_of(file.path, spec.format) == "text":
            return self.held_out.astype(bool)
        return self.positions.astype(np.float64) / 2.0**64 < spec.held_out


class RowFactsBuilder:
    """Collects the facts of rows. with_moments: whether a window asks for their times."""

    def __init__(self, *, with_moments: bool, time_column: str | None) -> None:
        self._with_moments, self._time_column = with_moments, time_column
        self._moments, self._held_out, self._positions = array("d"), array("B"), bytearray()
        self._manifest = ManifestBuilder()

    def add_row(self, row: Row) -> None:
        """Begins a row. Raises ValueError where it has no time, and a window asks for it."""
        self._moments.append(moment_of(row, column=self._time_column) if self._with_moments else math.nan)
        self._held_out.append(row.held_out)

    def add_content(self, content: Any, *, ends: bool = True) -> None:
        """Adds the content of a row, or a part of its text. ends: whether the row ends with it."""
        self._manifest.add(content, held_out=False, ends=ends)
        if not isinstance(content, str):
            self._positions += hashlib.sha256(split_key(content).encode()).digest()[:8]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns the columns of all rows."""
        hashes = self._manifest.hashes()
        return {
            "hashes": hashes,
            "positions": np.frombuffer(bytes(self._positions), dtype=">u8").astype(np.uint64)
            if self._positions
            else hashes,  # of a text, both are the same
            "held_out": np.array(self._held_out, dtype=np.uint8),
            "moments": np.array(self._moments, dtype=np.float64),
        }
