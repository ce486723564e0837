"""Linear programs for HiGHS, built column by column."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Entries = Sequence[tuple[int, float]]  # (row, coefficient) of a column


@dataclass
class LinearProgram:
    """Minimises cost x, subject to lower <= A x <= upper and x >= 0; columns are lists of (row, coefficient)."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    columns: list[list[tuple[int, float]]] = field(default_factory=list)
    limits: list[tuple[float, float]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)

    def row(self, lower: float, upper: float) -> int:
        """Adds a row and returns its index."""
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.lower) - 1

    def column(
        self, entries: Entries = (), *, cost: float = 0.0, upper: float = math.inf, is_integer: bool = False
    ) -> int:
        """Adds a column >= 0 and returns its index."""
        self.columns.append(list(entries))
        self.limits.append((0.0, upper))
        self.costs.append(cost)
        if is_integer:
            self.integer.append(len(self.columns) - 1)
        return len(self.columns) - 1

    def loaded(self) -> Any:
        """Returns HiGHS with this program, for one thread and a fixed seed."""
        import highspy
        import numpy as np

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.columns), len(self.lower)
        lp.col_cost_ = np.array(self.costs)
        lp.col_lower_, lp.col_upper_ = (np.array(side) for side in zip(*self.limits, strict=True))
        lp.row_lower_, lp.row_upper_ = np.array(self.lower), np.array(self.upper)
        if self.integer:
            kinds = [highspy.HighsVarType.kContinuous] * len(self.columns)
            for i in self.integer:
                kinds[i] = highspy.HighsVarType.kInteger
            lp.integrality_ = kinds
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(column) for column in self.columns)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([row for column in self.columns for row, _ in column], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([value for column in self.columns for _, value in column])
        highs: Any = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            highs.setOptionValue(name, value)
        highs.passModel(lp)
        return highs

    def values(self) -> list[float]:
        """Solves the program and returns an optimum by column; [] without one."""
        import highspy

        highs = self.loaded()
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return []
        return [float(value) for value in highs.getSolution().col_value]

    def prices(self) -> list[float] | None:
        """Solves the program and returns the dual prices of its rows; None without finite ones.

        A row `>=` has a price >= 0, and a row `<=` one <= 0, up to the solver's tolerance.
        """
        highs = self.loaded()
        highs.run()
        prices = [float(price) for price in highs.getSolution().row_dual]
        return prices if prices and all(map(math.isfinite, prices)) else None
