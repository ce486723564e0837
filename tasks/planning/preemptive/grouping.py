"""Groups of nodes that are planned together, the parts of jobs, and the first assignment of parts to groups.

A job is one part, or a few jobs are two, each on another type of devices.
"""

from itertools import pairwise

import numpy as np

from ringmaster.tasks.planning.kernels.tables import NEVER, Ints, NodeGroups, Tables
from ringmaster.tasks.planning.preemptive.sequences import JobShares
from ringmaster.tasks.planning.preemptive.splitting import TypeDivision
from ringmaster.tasks.planning.problems.problem import Problem

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
    found = JobShares(*(np.asarray(field)[source] for field in parts))
    kinds = np.array([*division.kinds, *(split.second for split in splits)], np.int32)
    found.held[num:], found.home[num:], found.at[num:], found.pinned[num:] = -1, -1, False, 0.0
    found.moved[num:] = True
    switch = tables.problem.switch_cost_s / tables.unit_s
    for q, split in enumerate(splits, start=num):
        p = split.job
        before = switch if found.moved[p] and found.held[p] < 0 else 0.0
        running = division.length * (1 + MARGIN)
        found.within[p], found.within[q] = split.until * running, (1 - split.until) * running
        found.due[p] = found.release[q] = before + found.within[p]
        found.share[p], found.share[q] = split.share, 1.0 - split.share
    return found, kinds


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
    tied = _tied(problem)
    grouped = []
    for kind in problem.device_types:
        of_kind = [v for v, node in enumerate(problem.nodes) if node.device_type == kind]
        of_kind.sort(key=lambda v: (-problem.nodes[v].num_devices, v))
        num_groups = max(1, len(of_kind) // span)
        ends = [g * len(of_kind) // num_groups for g in range(num_groups + 1)]
        chunks = [set(of_kind[a:b]) for a, b in pairwise(ends)]
        for together in tied:
            touched = [chunk for chunk in chunks if chunk & together]
            if len(touched) > 1:
                chunks = [chunk for chunk in chunks if not chunk & together] + [set().union(*touched)]
        grouped += sorted(sorted(chunk) for chunk in chunks) if tied else [sorted(chunk) for chunk in chunks]
    return grouped


def _tied(problem: Problem) -> list[set[int]]:
    """Returns the indices of the nodes of each running gang over several nodes."""
    place = {node.id: v for v, node in enumerate(problem.nodes)}
    gangs = [job.running.devices for job in problem.jobs if job.running]
    return [{place[node] for node, _ in devices} for devices in gangs if len(devices) > 1]


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
        (layout >= tables.slot[o]).sum() >= tables.spread[o]
        for o in range(tables.first[kind, job], tables.last[kind, job])
    )
