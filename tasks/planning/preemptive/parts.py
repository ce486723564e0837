"""The parts of a plan: every job in one, or a few in two, each on another type of devices."""

import numpy as np

from ringmaster.tasks.planning.kernels.tables import NEVER, Ints, NodeGroups, Tables
from ringmaster.tasks.planning.preemptive.sequences import Parts
from ringmaster.tasks.planning.preemptive.splitting import Division

MARGIN = 4e-3  # by how much plans are longer than the LP that divides jobs, about, as a share


def whole_jobs(tables: Tables, groups: NodeGroups) -> Parts:
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
    return Parts(
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


def split_jobs(tables: Tables, parts: Parts, division: Division) -> tuple[Parts, Ints]:
    """Returns the parts with those of jobs that are done on two types of devices, and the kind of nodes of each part.

    The first part of such a job is in the place of the whole job, the second after all others.
    """
    num, splits = parts.job.size, division.splits
    source = np.array([*range(num), *(split.job for split in splits)])
    found = Parts(*(np.asarray(field)[source] for field in parts))
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
