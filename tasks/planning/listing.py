"""List scheduling: jobs, each with its option, are placed one after another where they can start first."""

from collections.abc import Mapping, Sequence

from tasks.planning.plan import Segment
from tasks.planning.problem import Option, PlanningJob, Problem

Gang = tuple[tuple[str, tuple[int, ...]], ...]
Choice = tuple[str, int]  # a job's id and the index of its option


class Timeline:
    """When each device is free for good; gangs are only ever added behind what is there."""

    def __init__(self, problem: Problem) -> None:
        self.free_s = {node.id: [0.0] * node.num_devices for node in problem.nodes}

    def earliest(self, option: Option, ready_s: float = 0.0) -> tuple[float, list[str]]:
        """The first moment from `ready_s` when the gang fits, and its nodes: those that wait idle for it
        least."""
        slot = option.slot
        starts = []
        for i, (node, free_s) in enumerate(self.free_s.items()):
            if len(free_s) >= slot:
                in_order = sorted(free_s)
                start_s = max(ready_s, in_order[slot - 1])
                idle_s = sum(start_s - free for free in in_order if free <= start_s)
                starts.append((start_s, idle_s, i, node))
        starts.sort()
        chosen = starts[: option.num_nodes]
        return chosen[-1][0], [node for _, _, _, node in chosen]

    def take(self, option: Option, start_s: float, nodes: Sequence[str]) -> Gang:
        """Holds a gang from `start_s` for the option's runtime, on the devices that became free last."""
        gang = []
        for node in nodes:
            free_s = self.free_s[node]
            able = [device for device, free in enumerate(free_s) if free <= start_s + 1e-12]
            ids = sorted(able, key=lambda device: (-free_s[device], device))[: option.slot]
            for device in ids:
                free_s[device] = start_s + option.runtime_s
            gang.append((node, tuple(sorted(ids))))
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
