"""List scheduling: jobs, each with its option, are placed one after another where they can start first."""

from collections.abc import Mapping, Sequence

import numpy as np

from tasks.planning.plan import Segment
from tasks.planning.problem import Option, PlanningJob, Problem

Gang = tuple[tuple[str, tuple[int, ...]], ...]
Choice = tuple[str, int]  # a job's id and the index of its option


class Timeline:
    """When each device is free for good; gangs are only ever added behind what is there."""

    def __init__(self, problem: Problem) -> None:
        sizes = [node.num_devices for node in problem.nodes]
        self._nodes = problem.nodes
        # Each row is sorted by time; a device that does not exist is never free.
        self._free_s = np.full((len(sizes), max(sizes)), np.inf)
        self._device = np.tile(np.arange(max(sizes)), (len(sizes), 1))
        for v, size in enumerate(sizes):
            self._free_s[v, :size] = 0.0

    def earliest(self, option: Option, ready_s: float = 0.0) -> tuple[float, list[int]]:
        """The first moment from `ready_s` when the gang fits, and its nodes: those that wait idle for it
        least."""
        starts = np.maximum(self._free_s[:, option.slot - 1], ready_s)
        if option.num_nodes > 1:
            chosen = np.argsort(starts, kind="stable")[: option.num_nodes]
            return float(starts[chosen[-1]]), [int(v) for v in chosen]
        start_s = float(starts.min())
        ties = np.flatnonzero(starts == start_s)
        if len(ties) > 1:
            idle_s = np.maximum(start_s - self._free_s[ties], 0.0).sum(axis=1)
            return start_s, [int(ties[idle_s.argmin()])]
        return start_s, [int(ties[0])]

    def earliest_on(self, option: Option, node: int) -> float:
        """The first moment when the gang fits on one given node."""
        return float(self._free_s[node, option.slot - 1])

    def take(self, option: Option, start_s: float, nodes: Sequence[int]) -> Gang:
        """Holds a gang from `start_s` for the option's runtime, on the devices that became free last."""
        gang = []
        for v in nodes:
            free_s, device = self._free_s[v], self._device[v]
            top = int(np.searchsorted(free_s, start_s, side="right"))
            ids = tuple(sorted(int(d) for d in device[top - option.slot : top]))
            free_s[top - option.slot : top] = start_s + option.runtime_s
            order = np.argsort(free_s, kind="stable")
            self._free_s[v], self._device[v] = free_s[order], device[order]
            gang.append((self._nodes[v].id, ids))
        return tuple(gang)


def schedule(problem: Problem, choices: Sequence[Choice]) -> tuple[Segment, ...]:
    """One segment a job, placed in the order of `choices`; a job that waits for others comes behind them."""
    jobs = {job.id: job for job in problem.jobs}
    timeline, ends, segments = Timeline(problem), dict[str, float](), []
    for job_id, k in after_respected(choices, jobs):
        option = jobs[job_id].options[k]
        ready_s = max((ends[other] for other in jobs[job_id].after), default=0.0)
        start_s, nodes = timeline.earliest(option, ready_s)
        gang = timeline.take(option, start_s, nodes)
        ends[job_id] = start_s + option.runtime_s
        segments.append(Segment(job_id, k, start_s, ends[job_id], 1.0, 0.0, gang))
    return tuple(sorted(segments, key=lambda s: (s.start_s, s.job)))


def after_respected(choices: Sequence[Choice], jobs: Mapping[str, PlanningJob]) -> list[Choice]:
    """The same choices in the same order, except that each job is behind those that it waits for."""
    option_of, placed = dict(choices), dict[str, int]()

    def place(job_id: str) -> None:
        waiting = [job_id]
        while waiting:
            missing = [other for other in jobs[waiting[-1]].after if other not in placed]
            if missing:
                waiting.extend(missing)
            else:
                last = waiting.pop()
                placed.setdefault(last, option_of[last])

    for job_id, _ in choices:
        place(job_id)
    return list(placed.items())


def makespan_s(segments: Sequence[Segment]) -> float:
    """When the last segment ends."""
    return max(segment.end_s for segment in segments)
