"""List scheduling: jobs, each with its option, are placed one after another where they can start first."""

from collections.abc import Mapping, Sequence

import numpy as np

from tasks.planning.plan import Segment
from tasks.planning.problem import Option, PlanningJob, Problem

Gang = tuple[tuple[str, tuple[int, ...]], ...]
Choice = tuple[str, int]  # a job's id and the index of its option


class NoRoomError(ValueError):
    """A job fits nowhere: the nodes that could hold it go away before it would end."""


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
        never = [node.available_until_s for node in problem.nodes]
        self._until_s = np.array([np.inf if until_s is None else until_s for until_s in never])
        self._price = np.array([node.price for node in problem.nodes])
        self._is_uniform = len(problem.device_types) == 1 and not any(node.host_memory_bytes for node in problem.nodes)
        self._memory: list[list[tuple[float, float, int]]] = [[] for _ in sizes]

    def earliest(
        self, option: Option, ready_s: float = 0.0, *, cheaply_by_s: float | None = None
    ) -> tuple[float, list[int]]:
        """The first moment from `ready_s` when the gang fits, and its nodes: those that wait idle for it least.

        cheaply_by_s: take the cheapest nodes instead where the job then still ends by that time. Raises NoRoomError.
        """
        starts = np.maximum(self._free_s[:, option.slot - 1], ready_s)
        if not self._is_uniform:
            for v, node in enumerate(self._nodes):
                starts[v] = self._with_memory(option, v, starts[v]) if option.runs_on(node) else np.inf
        starts[starts + option.whole_s > self._until_s] = np.inf
        if option.num_nodes > 1 or cheaply_by_s is not None:
            keys = (np.arange(len(starts)), starts)
            if cheaply_by_s is not None:
                too_late = starts + option.whole_s > cheaply_by_s
                keys = (starts, np.where(too_late, np.inf, self._price), too_late)  # type: ignore[assignment]
            chosen = np.lexsort(keys)[: option.num_nodes]
            start_s = float(starts[chosen].max())
            if not np.isfinite(start_s) or any(
                self._with_memory(option, int(v), start_s) > start_s or start_s + option.whole_s > self._until_s[v]
                for v in chosen
            ):
                raise NoRoomError(f"no {option.num_nodes} node(s) hold {option.slot} devices for {option.whole_s} s")
            return start_s, [int(v) for v in chosen]
        start_s = float(starts.min())
        if not np.isfinite(start_s):
            raise NoRoomError(f"no node holds {option.slot} devices for {option.whole_s} s")
        ties = np.flatnonzero(starts == start_s)
        if len(ties) > 1:
            idle_s = np.maximum(start_s - self._free_s[ties], 0.0).sum(axis=1)
            return start_s, [int(ties[idle_s.argmin()])]
        return start_s, [int(ties[0])]

    def earliest_on(self, option: Option, node: int) -> float:
        """The first moment when the gang fits on one given node."""
        return float(self._free_s[node, option.slot - 1])

    def take(self, option: Option, start_s: float, nodes: Sequence[int]) -> Gang:
        """Holds a gang from `start_s` for all of the option's seconds, on the devices that became free last."""
        gang, end_s = [], start_s + option.whole_s
        for v in nodes:
            free_s, device = self._free_s[v], self._device[v]
            top = int(np.searchsorted(free_s, start_s, side="right"))
            ids = tuple(sorted(int(d) for d in device[top - option.slot : top]))
            free_s[top - option.slot : top] = end_s
            order = np.argsort(free_s, kind="stable")
            self._free_s[v], self._device[v] = free_s[order], device[order]
            if option.host_memory_bytes and self._nodes[v].host_memory_bytes is not None:
                self._memory[v].append((start_s, end_s, option.host_memory_bytes))
            gang.append((self._nodes[v].id, ids))
        return tuple(gang)

    def _with_memory(self, option: Option, v: int, start_s: float) -> float:
        """The first moment from `start_s` when the node has host memory for the option as long as it runs."""
        limit = self._nodes[v].host_memory_bytes
        if limit is None or not option.host_memory_bytes:
            return start_s
        for candidate_s in [start_s, *sorted(end for _, end, _ in self._memory[v] if end > start_s)]:
            beside = [row for row in self._memory[v] if row[1] > candidate_s and row[0] < candidate_s + option.whole_s]
            if sum(row[2] for row in beside) + option.host_memory_bytes <= limit:
                return candidate_s
        return np.inf


def schedule(problem: Problem, choices: Sequence[Choice], *, cheaply: bool = False) -> tuple[Segment, ...]:
    """One segment a job, placed in the order of `choices`; a job that waits for others comes behind them.

    cheaply: prefer cheap nodes to an early start, as far as deadlines allow. Raises NoRoomError.
    """
    jobs = {job.id: job for job in problem.jobs}
    timeline, ends, segments = Timeline(problem), dict[str, float](), []
    for job_id, k in after_respected(choices, jobs):
        job, option = jobs[job_id], jobs[job_id].options[k]
        ready_s = max([job.release_s, *(ends[other] for other in job.after)])
        by_s = (np.inf if job.deadline_s is None else job.deadline_s) if cheaply else None
        start_s, nodes = timeline.earliest(option, ready_s, cheaply_by_s=by_s)
        gang = timeline.take(option, start_s, nodes)
        ends[job_id] = start_s + option.whole_s
        overhead_s = option.whole_s - option.runtime_s
        segments.append(Segment(job_id, k, start_s, ends[job_id], 1.0, overhead_s, gang))
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
