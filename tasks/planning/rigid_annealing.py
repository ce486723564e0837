"""Plans without preemption by annealing over the sequence of jobs on each node and the option of each job."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from ringmaster.tasks.planning.bounds.job_costs import useful_options, whole_of
from ringmaster.tasks.planning.node_groups import Floats, Ints
from ringmaster.tasks.planning.plans.list_scheduling import Order, segments_of
from ringmaster.tasks.planning.plans.plan import Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.reductions import without_overheads
from ringmaster.tasks.planning.work import CORES, WorkBudget

# Initial temperature, share of it that is left at the end, weight of the device time used, distance of the target below
# the best makespan, whether options beyond the target are excluded. Each search has a row of its own, since none is
# best for all problems.
SETTINGS = (
    (0.1, 0.02, 0.05, 0.002, True),
    (0.16, 0.03, 0.05, 0.002, False),
    (0.1, 0.01, 0.02, 0.002, True),
    (0.06, 0.1, 0.1, 0.002, False),
)
FIRST_TARGET = 0.3  # position of the first target between the bound and the first plan
SLICE = 500_000  # steps between checks of the wall clock: a fifth of a second
STEP_S = 2e-9  # work of a step of the kernel's loops
NOWHERE = 1 << 20  # devices that an option needs on nodes of another type


def plan_without_preemption(
    problem: Problem,
    bound_s: float,
    *,
    options: Mapping[str, int] | None = None,
    num_searches: int = 4,
    steps: int = 1_000_000,
    seed: int = 0,
    enough: float = 0.0,
    work: WorkBudget | None = None,
) -> tuple[Segment, ...] | None:
    """Returns the best plan of `num_searches` annealings, two of which run at a time.

    They run in pairs. Each pair searches for a plan below the best makespan of the pairs before it.

    Returns None where more than runtimes decides when jobs can run (`node_orders.without_overheads`), or where a job
    has no option on a single node: gangs over several nodes are not considered. Jobs that run at time 0 continue on
    their devices.

    bound_s: a lower bound, the unit of all times.
    options: the initial options, such as the pattern MILP's.
    enough: a search stops when its plan is above the bound by at most this share of the bound.
    work: limits the searches, each of which cools down by its end; None for no limit.
    """
    bare = without_overheads(problem)
    table = _Table.of(problem, bare, bound_s, options or {}) if bare is not None else None
    if table is None:
        return None
    with ThreadPoolExecutor(CORES) as pool, (work or WorkBudget()).parallel(num_searches) as works:
        least, orders = math.inf, list[Order]()
        for at in range(0, num_searches, CORES):
            seeds = range(seed * num_searches + at, seed * num_searches + min(at + CORES, num_searches))
            search = partial(table.search, below=least, steps=steps, enough=enough)
            found = pool.map(lambda s, own, run=search: run(s, work=own), seeds, works[at:])
            least, orders = min([(least, orders), *found], key=lambda pair: pair[0])
    return segments_of(problem, orders)


@dataclass(frozen=True)
class _Table:
    """The jobs to place, by id, and their options, as (job, index in its own options), in arrays."""

    jobs: tuple[str, ...]
    rows: tuple[tuple[int, int], ...]
    first: Ints
    last: Ints
    need: Ints
    length: Floats
    begin: Ints
    kind: Ints
    size: Ints
    heads: Floats

    @classmethod
    def of(cls, problem: Problem, bare: Problem, bound_s: float, options: Mapping[str, int]) -> "_Table | None":
        """Builds the arrays; returns None where a job fits no node alone, or where there is nothing to place."""
        kinds = problem.device_types
        placed = [job for job, was in zip(bare.jobs, problem.jobs, strict=True) if was.running is None]
        fits = {
            job.id: [
                k
                for k in useful_options(job)
                if job.options[k].num_nodes == 1 and any(job.options[k].runs_on(node) for node in problem.nodes)
            ]
            for job in placed
        }
        if not placed or not all(fits.values()):
            return None
        rows = [(j, k) for j, job in enumerate(placed) for k in fits[job.id]]
        row_of = {(placed[j].id, k): i for i, (j, k) in enumerate(rows)}
        chosen = [placed[j].options[k] for j, k in rows]
        last = np.cumsum([len(fits[job.id]) for job in placed]).astype(np.int32)
        begin = []
        for job in placed:
            by_area = min(fits[job.id], key=lambda k: (job.options[k].num_devices * job.options[k].runtime_s, k))
            begin.append(row_of.get((job.id, options.get(job.id, -1)), row_of[job.id, by_area]))
        heads = np.zeros((len(problem.nodes), max(node.num_devices for node in problem.nodes)))
        for job in problem.jobs:
            if job.running is not None:
                end_s = whole_of(job, job.running.option, problem.switch_cost_s)
                for v, node in enumerate(problem.nodes):
                    for name, ids in job.running.devices:
                        if name == node.id:
                            heads[v, list(ids)] = end_s / bound_s
        for v, node in enumerate(problem.nodes):
            heads[v, : node.num_devices].sort()
        return cls(
            jobs=tuple(job.id for job in placed),
            rows=tuple(rows),
            first=np.append(0, last[:-1]).astype(np.int32),
            last=last,
            need=np.array(
                [[o.slot if o.device_type in ("", kind) else NOWHERE for o in chosen] for kind in kinds], np.int32
            ),
            length=np.array([o.runtime_s / bound_s for o in chosen]),
            begin=np.array(begin, np.int32),
            kind=np.array([kinds.index(node.device_type) for node in problem.nodes], np.int32),
            size=np.array([node.num_devices for node in problem.nodes], np.int32),
            heads=heads,
        )

    def search(
        self, seed: int, *, steps: int, enough: float, work: WorkBudget, below: float = math.inf
    ) -> tuple[float, list[Order]]:
        """Runs one annealing; returns the makespan in units of the bound, and the order of starts on each node.

        below: the makespan below which a plan is sought, in units of the bound; it is returned where none was found.
        """
        from ringmaster.tasks.planning.kernels.annealing import anneal

        option = self.begin.copy()
        sequences, counts, end = self._longest_first(option)
        settings = SETTINGS[seed % len(SETTINGS)]
        target = min(1.0 + FIRST_TARGET * max(0.0, end - 1.0), below - settings[3])
        limit = target if settings[4] else below * (1 - 1e-12)
        for j, o in enumerate(option):
            if self.length[o] > limit:
                faster = [k for k in range(self.first[j], self.last[j]) if self.length[k] <= limit]
                option[j] = min(faster, key=lambda k: self.length[k] * self.need[:, k].min(), default=o)
        sequences, counts, end = self._longest_first(option)
        best = sequences.copy(), counts.copy(), option.copy()
        state, good = np.array([min(end, below), target, 0.0, work.left_s / STEP_S]), 1.0 + max(1e-7, enough)
        for begin in range(0, steps, SLICE):
            if work.is_late() or state[0] <= good or state[2] >= state[3]:
                break
            anneal(
                self.first, self.last, self.need, self.length, self.kind, self.size, self.heads, sequences, counts,
                option, *best, state, settings, begin, min(steps, begin + SLICE), steps, good,
                1_000_003 * seed,
            )  # fmt: skip
        work.charge(STEP_S * state[2])
        sequences, counts, option = best
        orders = []
        for v, count in enumerate(counts):
            rows = [self.rows[option[j]] for j in sequences[v, :count]]
            orders.append(tuple((self.jobs[j], k) for j, k in rows))
        return float(state[0]), orders

    def _longest_first(self, option: Ints) -> tuple[Ints, Ints, float]:
        """Assigns jobs to nodes by area, the longest first, and returns the sequences, their lengths and the last end.

        The rows have spare width for jobs that move: eight times the mean, over the nodes that can run a job of those
        that the fewest nodes can run. Some node has room for every job then.
        """
        from ringmaster.tasks.planning.kernels.annealing import fill_node

        num_jobs, size = option.size, self.size
        num_hosts = min(int((size >= self.need[self.kind, o]).sum()) for o in np.unique(option))
        width = num_jobs if size.size <= 64 else min(num_jobs, 8 * num_jobs // num_hosts + 16)
        sequences, counts = np.zeros((size.size, width), np.int32), np.zeros(size.size, np.int32)
        load = self.heads.sum(axis=1)
        for j in np.argsort(-self.length[option], kind="stable"):
            fits = (size >= self.need[self.kind, option[j]]) & (counts < width)
            v = int(np.argmin(np.where(fits, load / size, np.inf)))
            sequences[v, counts[v]] = j
            counts[v] += 1
            load[v] += self.length[option[j]] * self.need[self.kind[v], option[j]]
        free, end = np.zeros(size.max()), 0.0
        for v in range(size.size):
            need = self.need[self.kind[v]]
            fill_node(sequences[v], counts[v], option, need, self.length, size[v], self.heads[v], free)
            end = max(end, float(free[size[v] - 1]))
        return sequences, counts, end
