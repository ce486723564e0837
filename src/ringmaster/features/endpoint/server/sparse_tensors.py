"""Matrices of which a client sends the values that it names alone, in compressed sparse rows (CSR)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SparseTensor:
    """A matrix of compressed sparse rows: row i has the values from rows[i] to rows[i + 1], in their columns."""

    values: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, values: np.ndarray, *, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, ...]
    ) -> SparseTensor:  # fmt: skip
        """Returns a checked matrix. Raises ValueError where its parts do not fit."""
        if len(shape) != 2 or min(shape) < 0 or len(rows) != shape[0] + 1 or len(columns) != len(values):
            raise ValueError(
                "a sparse tensor needs two dimensions, a row pointer more than rows, and each value's column"
            )
        is_whole = rows[0] == 0 and rows[-1] == len(values) and bool((np.diff(rows) >= 0).all())
        if not is_whole or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
            raise ValueError("a sparse tensor has row pointers or columns beyond its values or its shape")
        return cls(values=values, rows=rows, columns=columns, shape=(shape[0], shape[1]))

    def places(self) -> np.ndarray:
        """Returns the place of each value in the dense matrix, counted along its rows."""
        row_of = np.repeat(np.arange(self.shape[0]), np.diff(self.rows))
        return np.asarray(row_of * self.shape[1] + self.columns)

    def dense(self, *, fill: int = 0) -> np.ndarray:
        """Returns the dense matrix, with `fill` where it has no value."""
        result = np.full(self.shape[0] * self.shape[1], fill, self.values.dtype)
        result[self.places()] = self.values
        return result.reshape(self.shape)
