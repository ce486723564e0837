"""Flat arrays of a problem for the compiled kernels, with times in units of a lower bound."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.tasks.planning.bounds.bounds import Bound
from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.bounds.pattern_model import PatternModel
from ringmaster.tasks.planning.kernels.configurations import OptionTable
from ringmaster.tasks.planning.kernels.sequences import JobShares
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option
from ringmaster.tasks.planning.work import WorkBudget

WHOLE = 1e-6  # shares of a job that are smaller than this are none
STAYS = 1e-4  # price of the time of a running job on another type than its own, in the LP
FEW, TRIED = 16, 4  # jobs too many, from which on several are tried to be rounded, and how many
ROUND = 3  # a third of the jobs that are not to be divided are rounded between two solutions of the LP
COLUMN_S = 1.5e-5  # work of the first solution of the LP, per column
AGAIN_S = 1.5e-6  # work of every other solution, per column


@dataclass(frozen=True)
class Split:
    """A job that does `share` of its work on the first type of devices, and the rest on the second.

    first, second: indices into the problem's device types.
    until: when it changes from one to the other, as a share of the plan's length.
    """

    job: int
    first: int
    second: int
    share: float
    until: float


@dataclass(frozen=True)
class TypeDivision:
    """The index of each whole job's device type, the jobs that are done on two types, and the LP's value.

    kinds: by job; for a split job, its first type.
    length: in units of the bound.
    """

    kinds: tuple[int, ...]
    splits: tuple[Split, ...]
    length: float


@dataclass(frozen=True)
class _DividedJob:
    """A job of a class that the LP divides: by type, the share of the job and the time that it takes."""

    row: int
    share: Mapping[int, float]
    time: Mapping[int, float]
    whole: Mapping[int, int]  # further jobs of the class, by type

    @property
    def left(self) -> float:
        """The jobs of the class that `rarest` does without this one."""
        return float(self.whole.get(self.rarest, 0))

    @property
    def rarest(self) -> int:
        """The type that does least of the job."""
        return min(self.share, key=lambda kind: (self.share[kind], kind))


def divided(
    problem: Problem,
    bound: Bound,
    *,
    costs: Sequence[float],
    most: Sequence[int],
    homes: Mapping[int, tuple[int, int]],
    least_s: float,
    work: WorkBudget,
) -> TypeDivision | None:
    """Returns the types of devices for all jobs by the pattern LP, with few jobs on two types; None without a solution.

    The LP is solved again and again: each time, some of the jobs that it runs on several types are kept off the type
    that does least of them, those first whose share there is the least work. Of the last few, each time the one is
    chosen that lengthens the LP least.

    costs: of the jobs, at the prices of the bound.
    most: the number of jobs that may be divided, by type; at most one in each group of nodes.
    homes: the group of each running job, and the type of its devices. These jobs begin where they run.
    least_s: minimum length of a part.
    """
    model = PatternModel(problem, unit_s=bound.seconds)
    types = {kind: k for k, kind in enumerate(problem.device_types)}
    for row, jobs in enumerate(model.classes):
        if jobs[0] in homes:
            model.charge_elsewhere(row, problem.device_types[homes[jobs[0]][1]], STAYS)
    work.charge(COLUMN_S * model.num_columns)
    while model.solve(time_limit_s=work.time_left_s):
        done = model.work_by_kind()
        mixed = [m for row, by in enumerate(done) if (m := _mixed(row, {types[k]: x for k, x in by.items()}))]
        at_home = {row: homes[jobs[0]] for row, jobs in enumerate(model.classes) if jobs[0] in homes}
        size = {each.row: costs[model.classes[each.row][0]] * each.share[each.rarest] for each in mixed}
        excess, unwanted = _unwanted(mixed, size, most, at_home, least_s=least_s / bound.seconds, length=model.length)
        if not unwanted:
            return _division(mixed, [{types[k]: x for k, x in by.items()} for by in done], model, homes)
        if excess <= FEW:
            lengths = [_length_without(model, each, problem.device_types) for each in unwanted]
            unwanted = [unwanted[lengths.index(min(lengths))]]
            work.charge(AGAIN_S * model.num_columns * len(lengths))
        for each in unwanted:
            model.limit_work(each.row, problem.device_types[each.rarest], each.left)
        work.charge(AGAIN_S * model.num_columns)
    return None


def _mixed(row: int, done: Mapping[int, tuple[float, float]]) -> _DividedJob | None:
    """Returns the job of a class that is divided, from the (work, time) of the class by type; None if all are whole."""
    whole = {kind: int(work + WHOLE) for kind, (work, _) in done.items()}
    share = {kind: work - whole[kind] for kind, (work, _) in done.items() if work - whole[kind] > WHOLE}
    if len(share) < 2:
        return None
    return _DividedJob(row, share, {kind: share[kind] * done[kind][1] / done[kind][0] for kind in share}, whole)


def _length_without(model: PatternModel, mixed: _DividedJob, types: Sequence[str]) -> float:
    """Returns the LP's value if a job is kept off the type that does least of it."""
    model.limit_work(mixed.row, types[mixed.rarest], mixed.left)
    length = round(model.length, 9) if model.solve() else math.inf
    model.drop_limit()
    return length


def _unwanted(
    mixed: Sequence[_DividedJob],
    size: Mapping[int, float],
    most: Sequence[int],
    at_home: Mapping[int, tuple[int, int]],
    *,
    least_s: float,
    length: float,
) -> tuple[float, list[_DividedJob]]:
    """Returns how many jobs are too many, and those that are to be rounded next: all at once, or one of the last few.

    It is infinitely many where some jobs must not be divided as they are. A class of jobs may take longer than the LP
    if only one of them is divided, since the LP averages over the class.

    size, at_home: by class, the cost of the least part, and the group and type of a running job.
    least_s, length: the minimum length of a part, and the LP's value.
    """
    never: list[_DividedJob] = []
    left: list[_DividedJob] = []
    taken: set[int] = set()
    for each in sorted(mixed, key=lambda m: -min(m.time.values())):
        is_bad = len(each.share) > 2 or min(each.time.values()) < least_s
        is_bad = is_bad or sum(each.time.values()) > length * (1 + WHOLE)
        if (home := at_home.get(each.row)) is not None:
            is_bad = is_bad or home[1] not in each.share or home[0] in taken
            taken.add(home[0])
        (never if is_bad else left).append(each)
    if never:
        return math.inf, never
    used = Counter(kind for each in left for kind in each.share)
    over = {kind for kind, count in used.items() if count > most[kind]}
    excess = max((used[kind] - most[kind] for kind in over), default=0)
    crowded = sorted((e for e in left if over & set(e.share)), key=lambda m: (size[m.row], m.row))
    return excess, crowded[: TRIED if excess <= FEW else -(-excess // ROUND)]


def _division(
    mixed: Sequence[_DividedJob],
    done: Sequence[Mapping[int, tuple[float, float]]],
    model: PatternModel,
    homes: Mapping[int, tuple[int, int]],
) -> TypeDivision:
    """Returns the types of all jobs in a solution of the LP, by class the work and time on each type."""
    kinds, splits = [0] * len(model.problem.jobs), []
    by_row = {each.row: each for each in mixed}
    for row, jobs in enumerate(model.classes):
        left, works = list(jobs), {kind: work for kind, (work, _) in done[row].items()}
        if (each := by_row.get(row)) is not None:
            j = left.pop(0)
            first, second = sorted(each.share, key=lambda k: (j in homes and homes[j][1] != k, k))
            until = each.time[first] / (each.time[first] + each.time[second])
            splits.append(Split(j, first, second, each.share[first], until))
            kinds[j], works = first, {kind: float(count) for kind, count in each.whole.items()}
        for j in left:
            kind = max(works, key=lambda k: (works[k], -k))
            kinds[j], works[kind] = kind, works[kind] - 1.0
    return TypeDivision(tuple(kinds), tuple(splits), model.length)


NEVER = 1e18  # a time that is not a limit
MIN_RUN_SWITCHES = 5.0

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    """Options of all jobs in one row, and the worth of jobs and nodes at the certificate's prices.

    unit_s: seconds in one unit of time.
    options: the kernels' option table, for all kinds of nodes.
    index: index[o] is the option's index in the job's own options.
    cost: cost[v, j] is what the cheapest option of job j costs at the prices.
    own: own[j] is the price of the job's own time.
    pack: pack[v, g] is what a node of g devices earns in a unit of time.
    least_run_s: minimum run of a job that has several, by default five switch costs.
    """

    problem: Problem
    unit_s: float
    options: Any
    index: Ints
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
                options = ((k, job.options[k]) for k in useful_options(job))
                # Kernels assume that each option has room.
                rows += [(k, o) for k, o in options if sum(map(o.runs_on, of_kind_nodes)) >= o.num_nodes]
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
        rate = np.array([bound.seconds / option.runtime_s for _, option in rows])
        return cls(
            problem=problem,
            unit_s=bound.seconds,
            options=OptionTable(
                first=first,
                last=last,
                need=np.array([option.num_devices for _, option in rows], np.int32),
                rate=rate,
                liked=rate,
                slot=np.array([option.slot for _, option in rows], np.int32),
                spread=np.array([option.num_nodes for _, option in rows], np.int32),
            ),
            index=np.array([k for k, _ in rows], np.int32),
            cost=cost,
            own=np.array(own),
            pack=pack,
            least_run_s=MIN_RUN_SWITCHES * problem.switch_cost_s if least_run_s is None else least_run_s,
        )

    def options_of(self, kind: int) -> Any:
        """Returns the kernels' option table for one kind of nodes."""
        return self.options._replace(first=self.options.first[kind], last=self.options.last[kind])

    def option(self, kind: int, job: int, index: int) -> int:
        """Returns the row of a job's option for a kind of nodes; -1 where it does not run on them."""
        own = range(self.options.first[kind, job], self.options.last[kind, job])
        return next((o for o in own if self.index[o] == index), -1)


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


MARGIN = 4e-3  # by how much plans are longer than the LP that divides jobs, about, as a share


def whole_jobs(tables: Tables, groups: NodeGroups) -> JobShares:
    """Returns every job in one part, with the option and nodes on which it runs at time 0."""
    jobs = tables.problem.jobs
    num, width = len(jobs), groups.layouts.shape[1]
    held, home = np.full((2, num), -1, np.int32)
    at, pinned = np.zeros((num, width), np.bool_), np.zeros(num)
    place = {tables.problem.nodes[n].id: (g, v) for g, nodes in enumerate(groups.nodes) for v, n in enumerate(nodes)}
    for j, job in enumerate(jobs):
        if job.running is None:
            continue
        on = [place[node] for node, _ in job.running.devices]
        if len({g for g, _ in on}) > 1:
            continue
        home[j] = on[0][0]
        held[j] = tables.option(int(groups.kinds[home[j]]), j, job.running.option)
        at[j, [v for _, v in on]] = True
        pinned[j] = job.running.pinned_until_s / tables.unit_s
    return JobShares(
        job=np.arange(num, dtype=np.int32),
        share=np.ones(num),
        release=np.zeros(num),
        due=np.full(num, NEVER),
        within=np.full(num, NEVER),
        moved=np.array([job.started for job in jobs], np.bool_),
        held=held,
        home=home,
        at=at,
        pinned=pinned,
    )


def split_jobs(tables: Tables, parts: JobShares, division: TypeDivision) -> tuple[JobShares, Ints]:
    """Returns the parts with those of jobs that are done on two types of devices, and the kind of nodes of each part.

    The first part of such a job is in the place of the whole job, the second after all others.
    """
    num, splits = parts.job.size, division.splits
    source = np.array([*range(num), *(split.job for split in splits)])
    shares = JobShares(*(np.asarray(field)[source] for field in parts))
    kinds = np.array([*division.kinds, *(split.second for split in splits)], np.int32)
    shares.held[num:], shares.home[num:], shares.at[num:], shares.pinned[num:] = -1, -1, False, 0.0
    shares.moved[num:] = True
    switch = tables.problem.switch_cost_s / tables.unit_s
    for q, split in enumerate(splits, start=num):
        p = split.job
        before = switch if shares.moved[p] and shares.held[p] < 0 else 0.0
        running = division.length * (1 + MARGIN)
        shares.within[p], shares.within[q] = split.until * running, (1 - split.until) * running
        shares.due[p] = shares.release[q] = before + shares.within[p]
        shares.share[p], shares.share[q] = split.share, 1.0 - split.share
    return shares, kinds


OTHER_TYPE = 1e3  # penalty, in units of the bound, on devices of a type that was not chosen for the job
WRONG_TYPE = 0.3  # penalty, in units of the bound, on devices where a job costs twice as much
MAX_JOBS_AS_ONE, MAX_NODES_AS_ONE = 20, 8


def groupings_of(problem: Problem) -> list[list[list[int]]]:
    """Returns divisions of the nodes: groups just wide enough for any gang, and one group where it is affordable."""
    narrow = _grouped(problem)
    if (
        len(problem.device_types) == 1 < len(narrow)
        and len(problem.nodes) <= MAX_NODES_AS_ONE
        and len(problem.jobs) <= MAX_JOBS_AS_ONE
    ):
        return [narrow, [list(range(len(problem.nodes)))]]
    return [narrow]


def _grouped(problem: Problem) -> list[list[int]]:
    """Returns groups of nodes of one type, as small as the widest gang allows, with similar sizes together.

    The nodes of a running gang stay in one group.
    """
    span = max(option.num_nodes for job in problem.jobs for option in job.options)
    place = {node.id: v for v, node in enumerate(problem.nodes)}
    gangs = [job.running.devices for job in problem.jobs if job.running]
    tied = [{place[node] for node, _ in devices} for devices in gangs if len(devices) > 1]
    grouped = []
    for kind in problem.device_types:
        of_kind = [v for v, node in enumerate(problem.nodes) if node.device_type == kind]
        of_kind.sort(key=lambda v: (-problem.nodes[v].num_devices, v))
        num_groups = max(1, len(of_kind) // span)
        ends = [g * len(of_kind) // num_groups for g in range(num_groups + 1)]
        chunks = [set(of_kind[a:b]) for a, b in pairwise(ends)]
        for joined in tied:
            touched = [chunk for chunk in chunks if chunk & joined]
            if len(touched) > 1:
                chunks = [chunk for chunk in chunks if not chunk & joined] + [set().union(*touched)]
        grouped += sorted(sorted(chunk) for chunk in chunks) if tied else [sorted(chunk) for chunk in chunks]
    return grouped


def longest_first(tables: Tables, groups: NodeGroups, parts: JobShares, kinds: Ints | None) -> list[list[int]] | None:
    """Assigns parts to groups, the most costly first, each where it ends first at the certificate's prices.

    Running parts come before all others, and stay in their group. A group gets at most one part with a window. Returns
    None where a part fits no group.

    kinds: the kind of nodes of each part; None for any.
    """
    num_groups = len(groups.nodes)
    members: list[list[int]] = [[] for _ in range(num_groups)]
    load, own = np.zeros(num_groups), np.zeros(num_groups)
    able = np.array([[_fits(tables, groups, g, j) for j in range(tables.own.size)] for g in range(num_groups)])
    cost, has_window = tables.cost[:, parts.job] * parts.share, np.zeros(num_groups, np.bool_)
    for p in np.lexsort((-cost.min(axis=0), parts.within >= NEVER, parts.home < 0)):
        j, is_window = parts.job[p], parts.within[p] < NEVER
        ends = (load + cost[groups.kinds, p]) / (groups.worth + own + tables.own[j])
        # At the prices, a job belongs where it costs least; elsewhere, `ends` underestimates its time.
        ends += WRONG_TYPE * (cost[groups.kinds, p] / cost[:, p].min() - 1.0)
        ends[~able[:, j]] = np.inf
        ends[has_window & is_window] = np.inf
        ends += np.where(groups.kinds == kinds[p], 0.0, OTHER_TYPE) if kinds is not None else 0.0
        home = int(parts.home[p])
        stays = home >= 0 and (kinds is None or groups.kinds[home] == kinds[p] or parts.pinned[p] > 0.0)
        g = home if stays else int(np.argmin(ends))
        if not np.isfinite(ends[g]):
            return None
        members[g].append(int(p))
        load[g] += cost[groups.kinds[g], p]
        own[g] += tables.own[j]
        has_window[g] |= is_window
    return members


def _fits(tables: Tables, groups: NodeGroups, group: int, job: int) -> bool:
    """Whether some option of the job fits the group's nodes."""
    kind, layout = groups.kinds[group], groups.layout(group)
    return any(
        (layout >= tables.options.slot[o]).sum() >= tables.options.spread[o]
        for o in range(tables.options.first[kind, job], tables.options.last[kind, job])
    )
