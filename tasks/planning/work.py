"""How much a search may do, counted in work, so that it ends at the same point on every machine at any load.

Seconds of the wall depend on the machine and on what else runs there. Searches therefore count their own steps
(placements, pivots, trials) and charge them to a `WorkBudget`. Its unit is the time that the steps take on a quiet
machine with two cores, so that budgets can be stated in seconds. The wall clock only ends a search that takes much
longer than that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock


class Clock:
    """Counts the seconds of `now_s`, except those between `stop` and `go_on`.

    Calls of `stop` may be nested and come from any thread.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s, self._lock = now_s, Lock()
        self._num_stops, self._stopped_at_s, self._left_out_s = 0, 0.0, 0.0

    def __call__(self) -> float:
        """Returns seconds since an arbitrary start."""
        with self._lock:
            return (self._stopped_at_s if self._num_stops else self.now_s()) - self._left_out_s

    def stop(self) -> None:
        """Stops the clock."""
        with self._lock:
            if not self._num_stops:
                self._stopped_at_s = self.now_s()
            self._num_stops += 1

    def go_on(self) -> None:
        """Ends one `stop`; the clock resumes when all are ended."""
        with self._lock:
            self._num_stops -= 1
            if not self._num_stops:
                self._left_out_s += self.now_s() - self._stopped_at_s


clock = Clock()
"""The clock of the process, which compiles each kernel once for all its planners."""


WORK_S = 30.0  # default work of a search
TIME_LIMIT_S = 300.0  # default limit by the wall clock: ten times the default work
CORES = 2  # searches that run at a time, and the cores of the machine whose seconds count


@dataclass
class WorkBudget:
    """The work that a search may do, and what it has done so far, both in seconds of a quiet machine with two cores.

    Only steps that were charged count, in an order that does not depend on timing. Searches that run in parallel have a
    budget of their own each.

    ends_at_s: the time of `clock` at which the search ends in any case.
    """

    limit_s: float = math.inf
    ends_at_s: float = math.inf
    spent_s: float = 0.0

    @classmethod
    def of(cls, work_s: float, *, time_limit_s: float) -> WorkBudget:
        """Returns a budget that begins now. Its work is at most the time limit, so that no stage takes all of it."""
        return cls(limit_s=min(work_s, time_limit_s), ends_at_s=clock() + time_limit_s)

    @property
    def left_s(self) -> float:
        """The work that is left."""
        return max(0.0, self.limit_s - self.spent_s)

    @property
    def time_left_s(self) -> float:
        """The seconds of the wall clock that are left."""
        return max(0.0, self.ends_at_s - clock())

    def is_late(self) -> bool:
        """Whether the wall clock ends the search."""
        return clock() > self.ends_at_s

    def is_over(self) -> bool:
        """Whether the work is done, or the wall clock ends the search."""
        return self.spent_s >= self.limit_s or self.is_late()

    def charge(self, seconds: float) -> None:
        """Adds work that was done."""
        self.spent_s += seconds

    @contextmanager
    def part(self, share: float = 1.0) -> Iterator[WorkBudget]:
        """Yields a budget of a share of what is left; its work is charged to this one at the end."""
        own = WorkBudget(share * self.left_s, self.ends_at_s)
        try:
            yield own
        finally:
            self.charge(own.spent_s)

    @contextmanager
    def parallel(self, num: int) -> Iterator[list[WorkBudget]]:
        """Yields equal budgets for `num` searches, of which `CORES` run at a time; their work is charged at the end."""
        rounds = math.ceil(num / CORES)
        parts = [WorkBudget(self.left_s / max(1, rounds), self.ends_at_s) for _ in range(num)]
        try:
            yield parts
        finally:
            spent = [own.spent_s for own in parts]
            self.charge(max(max(spent, default=0.0), sum(spent) / CORES))
