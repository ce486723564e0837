"""How long each user's or batch's jobs would take on a fair share of the cluster: 1/N of all devices for N groups.

The seconds are those of a relaxation that anyone can recompute: a group's share of D devices is one machine, and a job
may divide its work w_o over its options o with runtime_o and devices_o. The group's seconds are the least T with

    sum_j area_j(T - head_j)  <=  T D        area_j(t) = min sum_o w_o devices_o runtime_o
                                             where sum_o w_o = 1 and sum_o w_o runtime_o <= t

head_j is the earliest second at which job j could start, by its release and the jobs that it waits for. Runtimes are
those of the whole job in one segment, and options that take more devices than D are left out, as long as the job has
another one. A group needs at least these seconds on its share if every job has an option that fits it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ringmaster.tasks.planning.problems.problem_parts import PlanningJob

BISECTIONS = 100  # halve the interval until it has no further float inside

Frontier = Sequence[tuple[float, float]]
"""(seconds, cost) of a job, such as device-seconds, from its fastest option to its cheapest one, convex."""


def group_of(job: PlanningJob) -> tuple[bool, str]:
    """Returns the group of a job. A job without a named one is a group of its own, whatever its name."""
    return (True, job.group) if job.group else (False, job.id)


def fair_seconds(jobs: Sequence[PlanningJob], num_devices: int) -> dict[str, float]:
    """Returns, by job id, the seconds in which the job's group could do its jobs on its share of the devices."""
    groups: dict[tuple[bool, str], list[PlanningJob]] = defaultdict(list)
    for job in jobs:
        groups[group_of(job)].append(job)
    heads_s = _heads_s({job.id: job for job in jobs})
    found: dict[str, float] = {}
    for members in groups.values():
        rows = [(heads_s[job.id], _frontier_on(job, num_devices / len(groups))) for job in members]
        found |= dict.fromkeys((job.id for job in members), _least_s(rows, num_devices / len(groups)))
    return found


def _frontier_on(job: PlanningJob, share: float) -> Frontier:
    """Returns the (seconds, device-seconds) that mixes of a job's options for a share of the devices reach."""
    alone = [option for option in job.options if not option.jobs]
    most = max(share, min(option.num_devices for option in alone))
    return frontier((o.whole_s, o.whole_s * o.num_devices) for o in alone if o.num_devices <= most)


def frontier(points: Iterable[tuple[float, float]]) -> Frontier:
    """Returns the (seconds, cost) of a job's options that no mix of others beats, by ascending seconds."""
    hull: list[tuple[float, float]] = []
    for t, cost in sorted(points):
        if hull and cost >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], (t, cost)):
            hull.pop()
        hull.append((t, cost))
    return hull


def _is_above(middle: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether the middle point is on or above the line between the other two."""
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])


def least_within(points: Frontier, within_s: float) -> float:
    """Returns the least cost of a job within some seconds; infinite where no option is fast enough."""
    if within_s < points[0][0]:
        return math.inf
    for (t0, a0), (t1, a1) in pairwise(points):
        if within_s < t1:
            return a0 + (a1 - a0) * (within_s - t0) / (t1 - t0)
    return points[-1][1]


def _least_s(rows: Sequence[tuple[float, Frontier]], share: float) -> float:
    low = max(head_s + points[0][0] for head_s, points in rows)
    high = max(low, max(head_s + points[-1][0] for head_s, points in rows), sum(p[-1][1] for _, p in rows) / share)

    def fits(end_s: float) -> bool:
        return sum(least_within(points, end_s - head_s) for head_s, points in rows) <= end_s * share

    if fits(low):
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _heads_s(jobs: Mapping[str, PlanningJob]) -> dict[str, float]:
    """Returns when each job could start if every job had all devices to itself, by job id."""
    heads: dict[str, float] = {}
    left = list(jobs.values())
    while left:
        ready = [job for job in left if all(other in heads for other in job.after)]
        for job in ready:
            waits = (heads[other] + min(o.whole_s for o in jobs[other].options) for other in job.after)
            heads[job.id] = max([job.release_s, *waits])
        left = [job for job in left if job.id not in heads]
    return heads
