"""A problem as the flat arrays that the compiled kernels read; times in units of a lower bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.planning.bounds import Bound, useful_options
from tasks.planning.plan import Certificate
from tasks.planning.problem import Option, Problem

NEVER = 1e18  # a time that is no limit

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    """Options of all jobs in one row, and what the certificate's prices say of jobs and nodes.

    unit_s: seconds of one unit of time. Options of job j on nodes of kind v stand at first[v, j] .. last[v,
    j] - 1; index[o] is the option's place in the job's own table, need[o] its devices, slot[o] those on each
    of its spread[o] nodes, rate[o] the share of the job that it does in a unit of time.
    cost[v, j]: what the cheapest option of job j costs at the prices, own[j] its own price; pack[g]: what a
    node of g devices earns in a unit of time.
    """

    problem: Problem
    unit_s: float
    first: Ints
    last: Ints
    index: Ints
    need: Ints
    slot: Ints
    spread: Ints
    rate: Floats
    cost: Floats
    own: Floats
    pack: Floats

    @classmethod
    def of(cls, problem: Problem, bound: Bound) -> "Tables":
        """The arrays of a problem, in units of its bound."""
        rows: list[tuple[int, Option]] = []
        first, last = [], []
        for job in problem.jobs:
            first.append(len(rows))
            rows += [(k, job.options[k]) for k in useful_options(job)]
            last.append(len(rows))
        prices, own = _prices(problem, bound.certificate)
        cost = [
            min(
                (option.num_nodes * prices[option.slot] + own[j]) * option.runtime_s / bound.seconds
                for option in job.options
            )
            for j, job in enumerate(problem.jobs)
        ]
        pack = [0.0]
        for size in range(1, max(node.num_devices for node in problem.nodes) + 1):
            pack.append(max(pack[-1], *(pack[size - s] + w for s, w in prices.items() if s <= size), 0.0))
        return cls(
            problem=problem,
            unit_s=bound.seconds,
            first=np.array([first], np.int32),
            last=np.array([last], np.int32),
            index=np.array([k for k, _ in rows], np.int32),
            need=np.array([option.num_devices for _, option in rows], np.int32),
            slot=np.array([option.slot for _, option in rows], np.int32),
            spread=np.array([option.num_nodes for _, option in rows], np.int32),
            rate=np.array([bound.seconds / option.runtime_s for _, option in rows]),
            cost=np.array([cost]),
            own=np.array(own),
            pack=np.array(pack),
        )

    @property
    def options(self) -> tuple[Any, ...]:
        """The arrays that kernels take, for options of all kinds of nodes."""
        return self.first, self.last, self.need, self.rate, self.slot, self.spread

    def options_of(self, kind: int) -> tuple[Any, ...]:
        """The arrays that kernels take, for one kind of nodes."""
        return self.first[kind], self.last[kind], self.need, self.rate, self.slot, self.spread


def _prices(problem: Problem, certificate: Certificate | None) -> tuple[dict[int, float], list[float]]:
    """The certificate's prices, plus a trifle for each device, so that no job looks free of cost."""
    slots = {option.slot for job in problem.jobs for option in job.options}
    known = certificate or Certificate({}, {})
    scale = sum(known.slot_prices.values()) + sum(known.job_prices.values()) or 1.0
    prices = {slot: known.slot_prices.get(slot, 0.0) + 1e-4 * scale * slot for slot in sorted(slots)}
    return prices, [known.job_prices.get(job.id, 0.0) for job in problem.jobs]


@dataclass(frozen=True)
class Groups:
    """Nodes that are planned together: indices into the problem's nodes, and for kernels their sizes and
    kinds."""

    nodes: tuple[tuple[int, ...], ...]
    layouts: Ints
    kinds: Ints
    worth: Floats

    @classmethod
    def of(cls, tables: Tables, nodes: Sequence[Sequence[int]]) -> "Groups":
        """The groups that `nodes` lists."""
        sizes = [node.num_devices for node in tables.problem.nodes]
        layouts = np.zeros((len(nodes), max(map(len, nodes))), np.int32)
        for g, members in enumerate(nodes):
            layouts[g, : len(members)] = [sizes[v] for v in members]
        worth = np.array([sum(tables.pack[sizes[v]] for v in members) for members in nodes])
        return cls(tuple(map(tuple, nodes)), layouts, np.zeros(len(nodes), np.int32), worth)

    def layout(self, group: int) -> Ints:
        """Devices of each of a group's nodes."""
        row: Ints = self.layouts[group]
        return np.asarray(row[row > 0], np.int32)
