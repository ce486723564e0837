"""Plans without preemption by annealing over the sequence of jobs on each node and the option of each job."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.tasks.planning.bounds.bounds import by_area, preemptive_bound
from ringmaster.tasks.planning.bounds.job_costs import pack_of, useful_options, whole_of, without_overheads
from ringmaster.tasks.planning.kernels import annealing
from ringmaster.tasks.planning.node_groups import Floats, Ints
from ringmaster.tasks.planning.plans.list_scheduling import Order, segments_of
from ringmaster.tasks.planning.plans.plan import Certificate, Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningNode
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

    Returns None where more than runtimes decides when jobs can run (`job_costs.without_overheads`), or where a job
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
            ended = pool.map(lambda s, own, run=search: run(s, work=own), seeds, works[at:])
            least, orders = min([(least, orders), *ended], key=lambda pair: pair[0])
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
            annealing.anneal(
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
            annealing.fill_node(sequences[v], counts[v], option, need, self.length, size[v], self.heads[v], free)
            end = max(end, float(free[size[v] - 1]))
        return sequences, counts, end


MAX_STATES = 2_000_000  # per node, at 50 bytes each
SLICE_STEPS = 100_000_000  # steps between checks of the wall clock: a tenth of a second
PER_STEP_S = 0.8e-9  # work of a step
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
        node: PlanningNode,
        kept: Mapping[str, Sequence[int]],
        costs: Mapping[str, Mapping[int, float]],
        limit_s: float,
    ) -> "Contents":
        """Selects the options in `kept` that fit the node.

        costs: by job and option, at the certificate's prices.
        """
        rows = [(j, k) for j, job in enumerate(problem.jobs) for k in kept[job.id] if job.options[k].runs_on(node)]
        own, every = np.array([j for j, _ in rows], np.int32), np.arange(len(problem.jobs))
        options = [problem.jobs[j].options[k] for j, k in rows]
        own_costs = [(costs[problem.jobs[j].id], k) for j, k in rows]
        return cls(
            jobs=tuple(job.id for job in problem.jobs),
            rows=rows,
            size=node.num_devices,
            first=np.searchsorted(own, every, side="left").astype(np.int32),
            last=np.searchsorted(own, every, side="right").astype(np.int32),
            need=np.array([option.slot for option in options], np.int32),
            length=np.array([int(option.runtime_s / limit_s * GRID) for option in options], np.int32),
            excess=np.array([cost[k] - min(cost.values()) for cost, k in own_costs]) / limit_s * GRID,
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
        within = wanted.copy()
        must = np.where(wanted, np.arange(wanted.size), wanted.size - 1)
        floor = np.where(wanted, worth - tolerance, np.inf)
        annealing.look_ahead(within, floor, must)
        self.states = np.empty((MAX_STATES, self.size), np.int32)
        self.parent, self.how = np.empty((2, MAX_STATES), np.int32)
        begin, count = np.zeros((2, wanted.size), np.int64)
        self.states[0], count[0] = 0, 1
        spans = zip(self.first, self.last, strict=True)
        cheapest = np.array([a + np.argmin(self.excess[a:b]) if b > a else 0 for a, b in spans], np.int32)
        progress, status = np.array([0, 1, 0], np.int64), annealing.ROOM
        max_work = int(min(max_work, budget.left_s / PER_STEP_S))
        while status == annealing.ROOM and not budget.is_late():
            status = annealing.extend(
                self.first, self.last, self.need, self.length, self.excess, cheapest, self.size, GRID, SHIFT,
                step, worth, floor, within, must, self.states, self.parent, self.how, begin, count, progress,
                SLICE_STEPS, max_work,
            )  # fmt: skip
        budget.charge(PER_STEP_S * progress[2])
        if status != annealing.DONE:
            raise SpentError
        self.state_of = annealing.first_ends(self.states, begin, count, self.size)
        done = wanted & (self.state_of >= 0)
        self.ends = np.where(done, self.states[self.state_of, self.size - 1], NEVER).astype(np.int32)
        return int(progress[2])

    def order(self, mask: int) -> Order:
        """Returns the order in which the node finishes a set."""
        at, choices = int(self.state_of[mask]), []
        while at:
            j, k = self.rows[self.how[at]]
            choices.append((self.jobs[j], k))
            at = int(self.parent[at])
        return tuple(reversed(choices))


MAX_JOBS = 14  # sets of jobs are bit masks, and tables over all sets are stored
MAX_WORK = 6_000_000_000  # steps: about five seconds
CLOSE = 2e-5  # a plan this close to the optimum counts as optimal: searching for a better one costs more
MARGIN = 1e-9  # relative rounding error


def search(
    problem: Problem,
    *,
    lower_s: float,
    upper_s: float,
    max_work: int = MAX_WORK,
    budget: WorkBudget | None = None,
) -> tuple[float, tuple[Order, ...] | None] | None:
    """Returns the seconds before which no plan without preemption ends, and the orders of the best plan.

    The orders are None where no plan ends before `upper_s`, the makespan of a known plan. Returns None where the
    problem has too many jobs or gangs over several nodes, where the known plan is as good as `lower_s`, or where the
    budget is spent first.

    problem: as `job_costs.without_overheads` returns it.
    max_work: limit of the steps of the dynamic program.
    budget: limits the steps as well; None for no limit.
    """
    options = [job.options[k] for job in problem.jobs for k in useful_options(job)]
    if len(problem.jobs) > MAX_JOBS or any(option.num_nodes > 1 for option in options):
        return None
    limit_s = upper_s * (1 - CLOSE)
    if limit_s <= lower_s:
        return None
    try:
        orders, end_s = ExhaustiveSearch(problem, limit_s, max_work, budget or WorkBudget()).run()
    except SpentError:
        return None
    return max(lower_s, end_s * (1 - MARGIN)), orders


class ExhaustiveSearch:
    """Searches for plans that end by `limit_s`."""

    def __init__(self, problem: Problem, limit_s: float, max_work: int, budget: WorkBudget) -> None:
        self.problem, self.limit_s, self.budget = problem, limit_s, budget
        self.work, self.max_work = 0, max_work
        self.kept = {job.id: useful_options(job) for job in problem.jobs}

    def run(self) -> tuple[tuple[Order, ...] | None, float]:
        """Returns the best plan that ends by the limit, and its end, or (None, the limit). Raises SpentError."""
        certificate = self._filter()
        if certificate is None:
            return None, self.limit_s
        self._price(certificate)
        return self._join()

    def _filter(self) -> Certificate | None:
        """Drops options that waste more than the slack, and computes new prices for the others.

        Returns the prices, or None where a job has no option left.
        """
        certificate = None
        for _ in range(4):
            before = dict(self.kept)
            for job in self.problem.jobs:
                fits = (k for k in self.kept[job.id] if job.options[k].runtime_s <= self.limit_s)
                self.kept[job.id] = tuple(fits)
            if not all(self.kept.values()):
                return None
            jobs = (replace(job, options=tuple(job.options[k] for k in self.kept[job.id])) for job in self.problem.jobs)
            reduced = replace(self.problem, jobs=tuple(jobs))
            bound = preemptive_bound(reduced)
            if bound.seconds > self.limit_s * (1 + MARGIN):
                return None
            is_priced = bound.certificate is not None and bound.certificate.has_slot_prices
            certificate = bound.certificate if is_priced and bound.certificate else by_area(reduced)
            costs, slack = self._costs(certificate)
            for job in self.problem.jobs:
                most = min(costs[job.id].values()) + slack + 1e-7 * self._earned(certificate)
                self.kept[job.id] = tuple(k for k in self.kept[job.id] if costs[job.id][k] <= most)
            if before == self.kept:
                break
        return certificate

    def _costs(self, certificate: Certificate) -> tuple[dict[str, dict[int, float]], float]:
        """Returns the cost of each remaining option, less the job's own price until the limit, and the slack."""
        costs = {}
        for job in self.problem.jobs:
            own, row = certificate.job_prices.get(job.id, 0.0), {}
            for k in self.kept[job.id]:
                option = job.options[k]
                kinds = self.problem.types_of(option)
                slot = min(certificate.prices_of(kind).get(option.slot, 0.0) for kind in kinds)
                row[k] = (own + slot) * option.runtime_s - own * self.limit_s
            costs[job.id] = row
        return costs, self._earned(certificate) - sum(min(row.values()) for row in costs.values())

    def _earned(self, certificate: Certificate) -> float:
        pack = {kind: pack_of(certificate.prices_of(kind), self.problem) for kind in self.problem.device_types}
        return self.limit_s * sum(pack[node.device_type][node.num_devices] for node in self.problem.nodes)

    def _price(self, certificate: Certificate) -> None:
        unit_s, every = self.limit_s / GRID, np.arange(1 << len(self.problem.jobs))
        self.costs, slack = self._costs(certificate)
        self.slack, self.worth = slack / unit_s, np.zeros(every.size)
        for j, job in enumerate(self.problem.jobs):
            self.worth += (every >> j & 1) * (min(self.costs[job.id].values()) / unit_s)
        packs = {kind: pack_of(certificate.prices_of(kind), self.problem) for kind in self.problem.device_types}
        self.steps = {kind: np.diff(pack) for kind, pack in packs.items()}

    def _join(self) -> tuple[tuple[Order, ...] | None, float]:
        """Joins disjoint sets over the nodes, the smallest first.

        The last node is only searched for complements of the sets that the others can finish.
        """
        kinds = [(node.num_devices, node.device_type) for node in self.problem.nodes]
        nodes = sorted(range(len(kinds)), key=lambda v: kinds[v])
        reached = np.full(self.worth.size, NEVER, np.int32)
        reached[0] = 0
        known: dict[tuple[int, str], Contents] = {}
        steps: list[tuple[int, Contents, NDArray[Any]]] = []
        for i, v in enumerate(nodes):
            if i == len(nodes) - 1:
                contents = self._contents(v, reached[::-1] != NEVER)  # the complements
            else:
                contents = known.get(kinds[v]) or self._contents(v)
                known[kinds[v]] = contents
            reached, how = annealing.unions(reached, contents.ends, NEVER)
            steps.append((v, contents, how))
        if reached[-1] == NEVER:
            return None, self.limit_s
        orders, mask = dict[int, Order](), reached.size - 1
        for v, contents, how in reversed(steps):
            orders[v] = contents.order(int(how[mask]))
            mask ^= int(how[mask])
        return tuple(orders[v] for v in range(len(nodes))), float(reached[-1]) / GRID * self.limit_s

    def _contents(self, v: int, candidates: NDArray[Any] | None = None) -> Contents:
        """Returns the sets of jobs that a node can finish without wasting more than the slack.

        candidates: restricts the sets.
        """
        node = self.problem.nodes[v]
        step = self.steps[node.device_type][: node.num_devices]
        earned = step.sum() * GRID
        tolerance = 1e-7 * earned
        wanted = (self.worth <= earned + tolerance) & (self.worth >= earned - self.slack - tolerance)
        contents = Contents.of(self.problem, node, self.kept, self.costs, self.limit_s)
        self.work += contents.fill(
            wanted if candidates is None else wanted & candidates,
            worth=self.worth,
            step=step,
            tolerance=tolerance,
            max_work=self.max_work - self.work,
            budget=self.budget,
        )
        return contents
