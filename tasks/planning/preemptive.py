"""Preemptive, malleable plans: jobs are divided among groups of nodes, each group is planned by a
configuration LP.

A *group* is one node, or as many as the widest gang spans. Within a group, column generation finds
configurations (sets of (job, option) that run together) and how long each runs; local search orders them so
that most gangs stay where they are and pays for each switch. Between groups, annealing moves and swaps jobs
on the exact values of such plans. The global pattern LP stays the bound for all of it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tasks.planning.bounds import Bound
from tasks.planning.certificates import MAX_STATES, num_states
from tasks.planning.plan import Certificate, Segment
from tasks.planning.problem import Problem
from tasks.planning.tables import NEVER, Floats, Groups, Ints, Tables

LEAST_RUN_SWITCHES = 5.0  # a shorter run of a job that has others is not planned
PER_SWITCH = 5e-4  # of the makespan: what a switch must gain, besides its own seconds
# Annealing: sharpness and first temperature of each stage. Where types of devices differ, the first guess is far from
# even, and a soft stage comes first that works on all slow groups at once.
STAGES = ((1000.0, 2e-3),)
STAGES_OF_TYPES = ((200.0, 5e-3), (1000.0, 1e-3))
TRIALS = 40_000  # of the last local search of each group, for ten members or fewer

WRONG_TYPE = 0.3  # bounds of time that a job may be later for costing twice as much
MAX_JOBS_AS_ONE, MAX_NODES_AS_ONE = 20, 8
MAX_PRICING = 12_000  # states times jobs of the check of work prices: half a second


@dataclass(frozen=True)
class Parts:
    """Shares of jobs, as groups do them: share[p] of job[p], between release[p] and due[p]; see `sequences`."""

    job: Ints
    share: Floats
    release: Floats
    due: Floats
    moved: Any

    @classmethod
    def whole(cls, num_jobs: int) -> "Parts":
        """Every job in one part."""
        job = np.arange(num_jobs, dtype=np.int32)
        return cls(job, np.ones(num_jobs), np.zeros(num_jobs), np.full(num_jobs, NEVER), np.zeros(num_jobs, np.bool_))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that kernels take."""
        return self.job, self.share, self.release, self.due, self.moved


def plan_preemptive(
    problem: Problem, bound: Bound, *, seed: int = 0, is_over: Callable[[], bool] = lambda: False
) -> tuple[Segment, ...] | None:
    """The segments of a preemptive plan; None where some job fits no group. Ignores `after`.

    Nodes are planned in groups that are as small as the widest gang allows; a small cluster also as one
    group.
    """
    tables = Tables.of(problem, bound)
    parts = Parts.whole(len(problem.jobs))
    found: list[tuple[Segment, ...] | None] = []
    for nodes in _groupings(problem):
        groups = Groups.of(tables, nodes)
        guess = _longest_first(tables, groups)
        if guess is not None and not (found and is_over()):
            members = _annealed(tables, groups, parts, guess, seed)
            found.append(_planned(tables, groups, parts, members))
    plans = [plan for plan in found if plan is not None]
    return min(plans, key=lambda segments: max(s.end_s for s in segments), default=None)


def work_prices(problem: Problem, bound: Bound) -> Certificate | None:
    """Prices of the jobs' work from the configuration LP of all nodes, which may prove more than the pattern
    LP."""
    from tasks.planning.config_lp import config_lp

    if (
        len(problem.device_types) > 1
        or num_states(problem) > MAX_STATES
        or num_states(problem) * len(problem.jobs) > MAX_PRICING
    ):
        return None
    tables = Tables.of(problem, bound)
    everything = np.arange(len(problem.jobs), dtype=np.int32)
    layout = np.array(sorted((node.num_devices for node in problem.nodes), reverse=True), np.int32)
    *_, prices = config_lp(everything, np.ones(everything.size), *tables.options_of(0), layout)
    return Certificate(work_prices={job.id: max(0.0, float(p)) for job, p in zip(problem.jobs, prices, strict=True)})


def _groupings(problem: Problem) -> list[list[list[int]]]:
    """Ways to divide the nodes: into groups just wide enough for any gang, and one group where that is
    affordable."""
    narrow = _grouped(problem)
    if (
        len(problem.device_types) == 1 < len(narrow)
        and len(problem.nodes) <= MAX_NODES_AS_ONE
        and len(problem.jobs) <= MAX_JOBS_AS_ONE
    ):
        return [narrow, [list(range(len(problem.nodes)))]]
    return [narrow]


def _planned(tables: Tables, groups: Groups, parts: Parts, members: Sequence[Ints]) -> tuple[Segment, ...] | None:
    """The plans of all groups together; groups are planned side by side on both cores."""
    segments: list[Segment] = []
    with ThreadPoolExecutor(2) as pool:
        every = range(len(groups.nodes))
        for plan in pool.map(lambda g: _group_segments(tables, groups, parts, g, members[g]), every):
            if plan is None:
                return None
            segments += plan
    return tuple(sorted(segments, key=lambda s: (s.start_s, s.job)))


def _grouped(problem: Problem) -> list[list[int]]:
    """Nodes of one type in groups that are as small as the widest gang allows, like sizes together."""
    span = max(option.num_nodes for job in problem.jobs for option in job.options)
    grouped = []
    for kind in problem.device_types:
        of_kind = [v for v, node in enumerate(problem.nodes) if node.device_type == kind]
        of_kind.sort(key=lambda v: (-problem.nodes[v].num_devices, v))
        num_groups = max(1, len(of_kind) // span)
        ends = [g * len(of_kind) // num_groups for g in range(num_groups + 1)]
        grouped += [sorted(of_kind[a:b]) for a, b in pairwise(ends)]
    return grouped


def _longest_first(tables: Tables, groups: Groups) -> list[list[int]] | None:
    """Jobs onto groups, the most costly first, each where it ends first by the certificate's prices."""
    num_groups = len(groups.nodes)
    members: list[list[int]] = [[] for _ in range(num_groups)]
    load, own = np.zeros(num_groups), np.zeros(num_groups)
    able = np.array([[_fits(tables, groups, g, j) for j in range(tables.own.size)] for g in range(num_groups)])
    for j in np.argsort(-tables.cost.min(axis=0), kind="stable"):
        ends = (load + tables.cost[groups.kinds, j]) / (groups.worth + own + tables.own[j])
        # At the prices, a job belongs where it costs least; elsewhere it takes more than it looks.
        ends += WRONG_TYPE * (tables.cost[groups.kinds, j] / tables.cost[:, j].min() - 1.0)
        ends[~able[:, j]] = np.inf
        g = int(np.argmin(ends))
        if not np.isfinite(ends[g]):
            return None
        members[g].append(int(j))
        load[g] += tables.cost[groups.kinds[g], j]
        own[g] += tables.own[j]
    return members


def _fits(tables: Tables, groups: Groups, group: int, job: int) -> bool:
    """Whether some option of the job has room on the group's nodes."""
    kind, layout = groups.kinds[group], groups.layout(group)
    return any(
        (layout >= tables.slot[o]).sum() >= tables.spread[o]
        for o in range(tables.first[kind, job], tables.last[kind, job])
    )


def _annealed(tables: Tables, groups: Groups, parts: Parts, members: Sequence[Sequence[int]], seed: int) -> list[Ints]:
    """Jobs by group after annealing; two searches with seeds of their own run side by side, the better one
    is taken."""
    from tasks.planning.assignment import assign

    num_groups, num_jobs = len(members), tables.own.size
    if num_groups == 1:
        return [np.array(members[0], np.int32)]
    switch = tables.problem.switch_cost_s / tables.unit_s
    width = min(num_jobs, max(map(len, members)) + 8)
    per_group = num_jobs / num_groups
    budget = int(np.clip(60_000 / per_group**1.5, 400, 4_000) * min(3.0, 1.0 + num_groups / 32))
    stages = STAGES if len(tables.problem.device_types) == 1 else STAGES_OF_TYPES

    def search(own_seed: int) -> tuple[float, Ints, Ints]:
        rows, counts = np.zeros((num_groups, width), np.int32), np.zeros(num_groups, np.int32)
        for g, jobs in enumerate(members):
            rows[g, : len(jobs)], counts[g] = jobs, len(jobs)
        for sharpness, heat in stages:
            score = assign(
                rows, counts, groups.kinds, groups.layouts, *parts.arrays, *tables.options,
                tables.cost, tables.own, groups.worth, switch, LEAST_RUN_SWITCHES * switch, PER_SWITCH,
                sharpness, heat, budget, 200 * budget, own_seed,
            )  # fmt: skip
        return float(score.max()), rows, counts

    with ThreadPoolExecutor(2) as pool:
        _, rows, counts = min(pool.map(search, [2 * seed, 2 * seed + 1]), key=lambda found: found[0])
    return [rows[g, : counts[g]].copy() for g in range(num_groups)]


def _group_segments(tables: Tables, groups: Groups, parts: Parts, group: int, members: Ints) -> list[Segment] | None:
    """The segments of one group; None where a job fits none of its nodes."""
    from tasks.planning.assignment import plan_group
    from tasks.planning.config_lp import INFEASIBLE
    from tasks.planning.sequences import runs

    if members.size == 0:
        return []
    layout, switch = groups.layout(group), tables.problem.switch_cost_s / tables.unit_s
    per_group = min(1.0, 24.0 / len(groups.nodes)) * min(1.0, (10.0 / members.size) ** 2)
    trials = int(np.clip(TRIALS * per_group, 500, TRIALS))
    score, _, sequence, times, _ = plan_group(
        members, *parts.arrays, *tables.options_of(int(groups.kinds[group])), layout,
        switch, LEAST_RUN_SWITCHES * switch, PER_SWITCH, trials, 1_000, INFEASIBLE,
    )  # fmt: skip
    if score >= INFEASIBLE:
        return None
    starts = np.zeros(sequence.shape, np.bool_)
    located = np.zeros((*sequence.shape, layout.size), np.bool_)
    runs(sequence, len(sequence), tables.slot, tables.spread, layout, starts, located)
    return realise(tables, groups.nodes[group], parts, members, sequence, times, starts, located)


def realise(
    tables: Tables,
    nodes: Sequence[int],
    parts: Parts,
    members: Ints,
    sequence: Ints,
    times: Floats,
    starts: Any,
    located: Any,
) -> list[Segment]:
    """A sequence of configurations as segments on devices: a gang that goes on keeps its devices.

    sequence[k, i]: the option of member i in configuration k, or -1, which lasts times[k]; located[k, i, v]:
    whether it is on the group's node v. A job ends as soon as its work is done.
    """
    problem, ends = tables.problem, np.concatenate([[0.0], np.cumsum(times)])
    held: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {}
    segments, done, ran = [], np.zeros(members.size), np.zeros(members.size, np.int64)
    for k in range(len(sequence)):
        held = {i: gang for i, gang in held.items() if sequence[k, i] >= 0 and not starts[k, i]}
        taken = {(v, d) for gang in held.values() for v, ids in gang for d in ids}
        for i in map(int, np.flatnonzero(starts[k])):
            o = int(sequence[k, i])
            gang = []
            for v in map(int, np.flatnonzero(located[k, i])):
                free = (d for d in range(problem.nodes[nodes[v]].num_devices) if (v, d) not in taken)
                ids = tuple(d for d, _ in zip(free, range(int(tables.slot[o])), strict=False))
                taken |= {(v, d) for d in ids}
                gang.append((v, ids))
            held[i] = tuple(gang)
            stop = k + 1
            while stop < len(sequence) and sequence[stop, i] == o and not starts[stop, i]:
                stop += 1
            part = int(members[i])
            job = problem.jobs[parts.job[part]]
            runtime_s = job.options[tables.index[o]].runtime_s
            pays = ran[i] > 0 or parts.moved[part]
            overhead_s = problem.switch_cost_s if pays else 0.0
            length_s = (ends[stop] - ends[k]) * tables.unit_s
            left = parts.share[part] - done[i]
            work = min(left, (length_s - overhead_s) / runtime_s)
            if work <= 1e-12:
                continue
            done[i] += work
            ran[i] += 1
            start_s = float(ends[k] * tables.unit_s)
            segments.append(
                Segment(
                    job=job.id,
                    option=int(tables.index[o]),
                    start_s=start_s,
                    end_s=start_s + overhead_s + float(work) * runtime_s,
                    work=float(work),
                    overhead_s=overhead_s,
                    devices=tuple((problem.nodes[nodes[v]].id, ids) for v, ids in gang),
                )
            )
    return segments
