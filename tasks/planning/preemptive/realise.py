"""Converts a sequence of configurations to segments on devices."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmaster.tasks.planning.kernels.tables import Floats, Ints, Tables
from ringmaster.tasks.planning.plans.plan import Segment
from ringmaster.tasks.planning.preemptive.sequences import Parts

Gang = tuple[tuple[int, tuple[int, ...]], ...]


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
    """Returns the segments of a group's sequence.

    A gang that continues keeps its devices, also those from before the plan. A job ends as soon as its work is done.

    sequence, times: sequence[k, i] is the option of member i in configuration k, or -1; the configuration lasts
        times[k].
    starts: starts[k, i] is whether a run begins there.
    located: located[k, i, v] is whether the member is on the group's node v.
    """
    problem, ends = tables.problem, np.concatenate([[0.0], np.cumsum(times)])
    held: dict[int, Gang] = {}
    segments, done, ran = [], np.zeros(members.size), np.zeros(members.size, np.int64)
    for k in range(len(sequence)):
        held = {i: gang for i, gang in held.items() if sequence[k, i] >= 0 and not starts[k, i]}
        if k == 0:
            goes_on = [i for i in range(members.size) if sequence[0, i] >= 0 and not starts[0, i]]
            held = {i: _running(tables, nodes, int(parts.job[members[i]])) for i in goes_on}
        else:
            goes_on = []
        taken = {(v, d) for gang in held.values() for v, ids in gang for d in ids}
        begin = [int(i) for i in np.flatnonzero(starts[k])]
        for i in begin:
            o = int(sequence[k, i])
            held[i] = _gang(problem.nodes, nodes, located[k, i], int(tables.slot[o]), taken)
        for i in sorted([*begin, *goes_on]):
            o = int(sequence[k, i])
            stop = k + 1
            while stop < len(sequence) and sequence[stop, i] == o and not starts[stop, i]:
                stop += 1
            part = int(members[i])
            job = problem.jobs[parts.job[part]]
            runtime_s = job.options[tables.index[o]].runtime_s
            pays = i not in goes_on and (ran[i] > 0 or parts.moved[part])
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
                    devices=tuple((problem.nodes[nodes[v]].id, ids) for v, ids in held[i]),
                )
            )
    return segments


def _running(tables: Tables, nodes: Sequence[int], job: int) -> Gang:
    """Returns the devices on which a job runs at time 0, by index of the group's nodes."""
    running = tables.problem.jobs[job].running
    assert running is not None, "only a job that runs goes on"
    place = {tables.problem.nodes[n].id: v for v, n in enumerate(nodes)}
    return tuple((place[node], tuple(ids)) for node, ids in running.devices)


def _gang(every: Sequence[Any], nodes: Sequence[int], on: Any, slot: int, taken: set[tuple[int, int]]) -> Gang:
    """Returns the first free devices on the nodes v with on[v], and adds them to `taken`."""
    gang = []
    for v in map(int, np.flatnonzero(on)):
        free = (d for d in range(every[nodes[v]].num_devices) if (v, d) not in taken)
        ids = tuple(d for d, _ in zip(free, range(slot), strict=False))
        assert len(ids) == slot, "the configuration fits"
        taken |= {(v, d) for d in ids}
        gang.append((v, ids))
    return tuple(gang)
