"""A linear program in arrays, in HiGHS: one thread and a fixed seed, so that results repeat."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Entries = Sequence[tuple[int, float]]  # (row, coefficient) of a column, or (column, coefficient) of a row


@dataclass
class LinearProgram:
    """Minimises cost x, subject to lower <= A x <= upper and x >= 0; columns are lists of (row, coefficient).

    slots: rows of the slots of one size, by (..., size); what comes before the size is where they are.
    """

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    columns: list[list[tuple[int, float]]] = field(default_factory=list)
    limits: list[tuple[float, float]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    slots: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def row(self, lower: float, upper: float, entries: Entries = ()) -> int:
        """Adds a row and returns its index. entries: the (column, coefficient) of columns that are there."""
        self.lower.append(lower)
        self.upper.append(upper)
        for column, coefficient in entries:
            self.columns[column].append((len(self.lower) - 1, coefficient))
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

    def slot_row(self, *key: Any) -> int:
        """Returns the row of the slots with a key of `slots`, and adds it where it is missing."""
        if key not in self.slots:
            self.slots[key] = self.row(-math.inf, 0.0)
        return self.slots[key]

    def add_walks(self, places: Sequence[int], *where: Any) -> None:
        """Adds the columns by which nodes divide their time into the slots that are there.

        places: the rows of the positions 0..G-1.
        where: the key of the slots, without their size.
        """
        size = len(places)
        rows = {key[-1]: row for key, row in self.slots.items() if key[:-1] == where}
        for place, slot in walk_steps(size, rows):
            entries = [(rows[slot], -1.0)] if slot else []
            entries.append((places[place], 1.0))
            if (reached := place + max(1, slot)) < size:
                entries.append((places[reached], -1.0))
            self.column(entries)

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

    def values(self, *, tolerance: float = 1e-7) -> list[float]:
        """Solves the program and returns an optimum by column; [] without one.

        tolerance: by which constraints may be violated.
        """
        return self.optimum(tolerance=tolerance)[0]

    def optimum(self, *, tolerance: float = 1e-7) -> tuple[list[float], list[float]]:
        """Solves the program and returns an optimum by column, and the dual prices of its rows; [] and [] without one.

        tolerance: by which constraints may be violated.
        """
        import highspy

        highs = self.loaded()
        highs.setOptionValue("primal_feasibility_tolerance", tolerance)
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return [], []
        solution = highs.getSolution()
        return list(map(float, solution.col_value)), list(map(float, solution.row_dual))

    def prices(self) -> list[float] | None:
        """Solves the program and returns the dual prices of its rows; None without finite ones.

        A row `>=` has a price >= 0, and a row `<=` one <= 0, up to the solver's tolerance.
        """
        highs = self.loaded()
        highs.run()
        prices = [float(price) for price in highs.getSolution().row_dual]
        return prices if prices and all(map(math.isfinite, prices)) else None


def walk_steps(size: int, slots: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the (position, slot) of the steps by which a node divides its devices, 0 for a device that is left idle.

    A node of G devices is a line of positions 0..G. A slot of s devices is a step from v to v + s, and a device left
    idle is a step from v to v + 1. On a walk from 0 to G, larger slots come first, so that fewer steps are needed.
    """
    reachable = [True] + [False] * size
    steps = []
    for slot in sorted(slots, reverse=True):
        for place in range(size - slot + 1):
            if reachable[place]:
                reachable[place + slot] = True
                steps.append((place, slot))
    return [*steps, *((place, 0) for place in range(size))]
