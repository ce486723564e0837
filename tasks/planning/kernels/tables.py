"""Flat arrays of a problem for the compiled kernels, with times in units of a lower bound."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringmaster.tasks.planning.bounds.bounds import Bound
from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.kernels.packing import OptionTable
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningNode

NEVER = 1e18  # a time that is no limit
LEAST_RUN_SWITCHES = 5.0

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    """Options of all jobs in one row, and the worth of jobs and nodes at the certificate's prices.

    unit_s: seconds in one unit of time.
    first, last: the options of job j on nodes of kind v are first[v, j] .. last[v, j] - 1.
    index: index[o] is the option's index in the job's own options.
    need, slot, spread: option o takes need[o] devices, slot[o] on each of spread[o] nodes.
    rate: rate[o] is the share of the job that it does in a unit of time.
    cost: cost[v, j] is what the cheapest option of job j costs at the prices.
    own: own[j] is the price of the job's own time.
    pack: pack[v, g] is what a node of g devices earns in a unit of time.
    least_run_s: minimum run of a job that has several, by default five switch costs.
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
    least_run_s: float

    @classmethod
    def of(cls, problem: Problem, bound: Bound, *, least_run_s: float | None = None) -> "Tables":
        """Builds the arrays of a problem, in units of its bound."""
        kinds = problem.device_types
        rows: list[tuple[int, Option]] = []
        first, last = np.zeros((2, len(kinds), len(problem.jobs)), np.int32)
        for v, kind in enumerate(kinds):
            of_kind_nodes = [node for node in problem.nodes if node.device_type == kind]
            for j, job in enumerate(problem.jobs):
                first[v, j] = len(rows)
                running = {job.running.option} if job.running else set()
                known = sorted({*useful_options(job), *running})
                rows += [(k, o) for k in known if _has_room(o := job.options[k], of_kind_nodes)]
                last[v, j] = len(rows)
        prices, own = _prices(problem, bound.certificate)
        cost = np.zeros((len(kinds), len(problem.jobs)))
        pack = np.zeros((len(kinds), max(node.num_devices for node in problem.nodes) + 1))
        for v, kind in enumerate(kinds):
            of_kind = prices[kind]
            for j in range(len(problem.jobs)):
                cost[v, j] = min(
                    (
                        (option.num_nodes * of_kind[option.slot] + own[j]) * option.runtime_s / bound.seconds
                        for _, option in rows[first[v, j] : last[v, j]]
                    ),
                    default=NEVER,
                )
            for size in range(1, pack.shape[1]):
                fits = (pack[v, size - s] + w for s, w in of_kind.items() if s <= size)
                pack[v, size] = max([pack[v, size - 1], *fits])
        return cls(
            problem=problem,
            unit_s=bound.seconds,
            first=first,
            last=last,
            index=np.array([k for k, _ in rows], np.int32),
            need=np.array([option.num_devices for _, option in rows], np.int32),
            slot=np.array([option.slot for _, option in rows], np.int32),
            spread=np.array([option.num_nodes for _, option in rows], np.int32),
            rate=np.array([bound.seconds / option.runtime_s for _, option in rows]),
            cost=cost,
            own=np.array(own),
            pack=pack,
            least_run_s=LEAST_RUN_SWITCHES * problem.switch_cost_s if least_run_s is None else least_run_s,
        )

    @property
    def options(self) -> OptionTable:
        """The kernels' option table, for all kinds of nodes."""
        return OptionTable(self.first, self.last, self.need, self.rate, self.rate, self.slot, self.spread)

    def options_of(self, kind: int) -> OptionTable:
        """Returns the kernels' option table for one kind of nodes."""
        return self.options._replace(first=self.first[kind], last=self.last[kind])

    def option(self, kind: int, job: int, index: int) -> int:
        """Returns the row of a job's option for a kind of nodes; -1 where it does not run on them."""
        own = range(self.first[kind, job], self.last[kind, job])
        return next((o for o in own if self.index[o] == index), -1)


def _has_room(option: Option, nodes: Sequence[PlanningNode]) -> bool:
    """Whether an option can run on nodes of one kind at all, which kernels assume."""
    return sum(option.runs_on(node) for node in nodes) >= option.num_nodes


def _prices(problem: Problem, certificate: Certificate | None) -> tuple[dict[str, dict[int, float]], list[float]]:
    """Returns the certificate's prices by device type, and those of the jobs' own time.

    A small amount is added for each device, so that no job is free of cost.
    """
    slots = sorted({option.slot for job in problem.jobs for option in job.options})
    known = certificate or Certificate()
    every = {kind: known.prices_of(kind) for kind in problem.device_types}
    scale = sum(sum(prices.values()) for prices in every.values()) + sum(known.job_prices.values()) or 1.0
    full = {kind: {s: prices.get(s, 0.0) + 1e-4 * scale * s for s in slots} for kind, prices in every.items()}
    return full, [known.job_prices.get(job.id, 0.0) for job in problem.jobs]


@dataclass(frozen=True)
class NodeGroups:
    """Groups of nodes that are planned together.

    nodes: indices into the problem's nodes, by group.
    layouts, kinds: the sizes and the kind of each group's nodes, for kernels.
    worth: worth of each group per unit of time at the certificate's prices.
    """

    nodes: tuple[tuple[int, ...], ...]
    layouts: Ints
    kinds: Ints
    worth: Floats

    @classmethod
    def of(cls, tables: Tables, nodes: Sequence[Sequence[int]]) -> "NodeGroups":
        """Builds the groups that `nodes` lists."""
        sizes = [node.num_devices for node in tables.problem.nodes]
        layouts = np.zeros((len(nodes), max(map(len, nodes))), np.int32)
        for g, members in enumerate(nodes):
            layouts[g, : len(members)] = [sizes[v] for v in members]
        types = tables.problem.device_types
        kinds = [types.index(tables.problem.nodes[members[0]].device_type) for members in nodes]
        worth = [sum(tables.pack[kind, sizes[v]] for v in group) for kind, group in zip(kinds, nodes, strict=True)]
        return cls(tuple(map(tuple, nodes)), layouts, np.array(kinds, np.int32), np.array(worth))

    def layout(self, group: int) -> Ints:
        """Returns the number of devices of each of a group's nodes."""
        row: Ints = self.layouts[group]
        return np.asarray(row[row > 0], np.int32)
