"""Sets of jobs that one node can finish by a given time: the dynamic program of `non_preemptive.exhaustive`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.tasks.planning.plans.node_orders import Order
from ringmaster.tasks.planning.problems.parts import Node
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.work import WorkBudget

MAX_STATES = 2_000_000  # per node, at 50 bytes each
SLICE = 100_000_000  # steps between checks of the wall clock: a tenth of a second
STEP_S = 0.8e-9  # work of a step
SHIFT = 22  # bits by which a time is shifted to leave seven
GRID = 1 << (SHIFT + 7)  # the time limit in units; lengths are rounded down, so that no plan is excluded
NEVER = GRID + 1


class SpentError(Exception):
    """The search budget is spent, so nothing is found or proved."""


@dataclass
class Contents:
    """The rows (job, option) that fit one node, and the sets of jobs that it can finish.

    `fill` sets ends[mask] to the earliest end of the set `mask`, or to NEVER.
    """

    jobs: tuple[str, ...]
    rows: list[tuple[int, int]]
    size: int
    first: NDArray[Any]
    last: NDArray[Any]
    need: NDArray[Any]
    length: NDArray[Any]
    excess: NDArray[Any]
    ends: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def of(
        cls,
        problem: Problem,
        node: Node,
        kept: Mapping[str, Sequence[int]],
        costs: Sequence[Mapping[str, Mapping[int, float]]],
        limit_s: float,
    ) -> "Contents":
        """Selects the options in `kept` that fit the node.

        costs: by job and option, for each certificate's prices.
        """
        rows = [(j, k) for j, job in enumerate(problem.jobs) for k in kept[job.id] if job.options[k].runs_on(node)]
        own, every = np.array([j for j, _ in rows], np.int32), np.arange(len(problem.jobs))
        options = [problem.jobs[j].options[k] for j, k in rows]
        names = [problem.jobs[j].id for j, _ in rows]
        dearer = [
            [cost[name][k] - min(cost[name].values()) for name, (_, k) in zip(names, rows, strict=True)]
            for cost in costs
        ]
        return cls(
            jobs=tuple(job.id for job in problem.jobs),
            rows=rows,
            size=node.num_devices,
            first=np.searchsorted(own, every, side="left").astype(np.int32),
            last=np.searchsorted(own, every, side="right").astype(np.int32),
            need=np.array([option.slot for option in options], np.int32),
            length=np.array([int(option.runtime_s / limit_s * GRID) for option in options], np.int32),
            excess=np.array(dearer).reshape(len(costs), len(rows)) / limit_s * GRID,
        )

    def fill(
        self,
        wanted: NDArray[Any],
        *,
        worth: NDArray[Any],
        step: NDArray[Any],
        tolerance: float,
        max_work: int,
        budget: WorkBudget,
    ) -> int:
        """Finds the wanted sets that the node can finish, and returns the number of steps taken. Raises SpentError."""
        from ringmaster.tasks.planning.kernels.exhaustive import DONE, ROOM, extend, first_ends, look_ahead

        within = wanted.copy()
        must = np.where(wanted, np.arange(wanted.size), wanted.size - 1)
        floor = np.where(wanted, worth - tolerance, np.inf)
        look_ahead(within, floor, must)
        self.states = np.empty((MAX_STATES, self.size), np.int32)
        self.parent, self.how = np.empty((2, MAX_STATES), np.int32)
        begin, count = np.zeros((2, wanted.size), np.int64)
        self.states[0], count[0] = 0, 1
        cheapest, latest = self._cheapest(), self._latest(int(must[0]))
        progress, said = np.array([0, 1, 0], np.int64), ROOM
        max_work = int(min(max_work, budget.left_s / STEP_S))
        while said == ROOM and not budget.is_late():
            said = extend(
                self.first, self.last, self.need, self.length, latest, self.excess, cheapest, self.size, GRID, SHIFT,
                step, worth, floor, within, must, self.states, self.parent, self.how, begin, count, progress, SLICE,
                max_work,
            )  # fmt: skip
        budget.charge(STEP_S * progress[2])
        if said != DONE:
            raise SpentError
        self.state_of = first_ends(self.states, begin, count, self.size)
        done = wanted & (self.state_of >= 0)
        self.ends = np.where(done, self.states[self.state_of, self.size - 1], NEVER).astype(np.int32)
        return int(progress[2])

    def order(self, mask: int) -> Order:
        """Returns the order in which the node finishes a set."""
        at, found = int(self.state_of[mask]), []
        while at:
            j, k = self.rows[self.how[at]]
            found.append((self.jobs[j], k))
            at = int(self.parent[at])
        return tuple(reversed(found))

    def _cheapest(self) -> NDArray[Any]:
        """Returns the row of each job's cheapest option, for each certificate's prices."""
        spans = list(zip(self.first, self.last, strict=True))
        found = [[a + int(np.argmin(row[a:b])) if b > a else 0 for a, b in spans] for row in self.excess]
        return np.array(found, np.int32).reshape(len(self.excess), len(spans))

    def _latest(self, shared: int) -> NDArray[Any]:
        """Returns the latest start of each option.

        A node's schedule can be reversed in time. So the longest of the shared jobs may be required to be in the first
        half, with its middle no later than half of the time limit.

        shared: the jobs that all wanted sets have in common, as a bit mask.
        """
        latest = GRID - self.length
        jobs = [j for j in range(len(self.jobs)) if shared >> j & 1 and self.last[j] > self.first[j]]
        if jobs:
            longest = max(jobs, key=lambda j: self.length[self.first[j] : self.last[j]].min())
            latest[self.first[longest] : self.last[longest]] //= 2
        return np.asarray(latest, np.int32)
