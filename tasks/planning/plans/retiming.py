"""Optimal times for a plan with given gangs and order: a linear program that is exact in all overheads.

The *structure* of a plan is the set of its segments, their devices, and their order on each device and within each job.
Searches choose a structure with approximate times; the linear program then decides the length of each segment.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.objectives import MAKESPAN, Coefficients, Objective
from ringmaster.tasks.planning.plans.plan import Segment
from ringmaster.tasks.planning.problems.problem import Problem, overhead_s
from ringmaster.tasks.planning.problems.problem_parts import PlanningJob

LATE = 1e3  # weight of a second of lateness, in seconds of the objective
TRIFLE = 1e-6  # weight of early ends, which break ties
SAME = 1e-12  # relative difference of times that count as equal


def retimed(
    problem: Problem, segments: Sequence[Segment], *, objective: Objective = MAKESPAN, least_s: float = 0.0
) -> tuple[Segment, ...] | None:
    """Returns the segments in the same order, on the same devices, with the best times for the objective.

        min T + sum_j ends_j end_j + sum_n prices_n held_n  +  LATE lateness  +  TRIFLE ends
        work       sum_i (end_i - start_i - overhead_i) / runtime_i = 1           over the segments i of each job
        order      start_k >= end_i         where k follows i on a device, of a job, by `after`, in full memory or limit
        length     end_i - start_i >= overhead_i, and >= least_s for jobs with several segments
        windows    start >= release, end <= deadline + late, end <= the node's last second, latest_j end <= T

    `latest`, `ends` and `prices` are the coefficients of the objective. Of the given times, only the order matters.
    Returns None where no times satisfy all constraints.
    """
    structure = _Structure.of(problem, segments, least_s)
    if not structure.keeps_pinned:
        return None
    lengths_s = structure.best_lengths_s(objective.coefficients(problem))
    return None if lengths_s is None else structure.with_lengths(lengths_s)


@dataclass(frozen=True)
class _Structure:
    """Segments by start, with the overhead and minimum length of each, and the order as pairs (before, after)."""

    problem: Problem
    jobs: dict[str, PlanningJob]
    segments: tuple[Segment, ...]
    paid_s: tuple[float, ...]
    least_s: tuple[float, ...]
    held_at_0: tuple[bool, ...]
    of_job: dict[str, list[int]]
    follows: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, problem: Problem, segments: Sequence[Segment], least_s: float) -> "_Structure":
        """Builds the structure of a plan; segments that continue without a pause are joined."""
        rows, jobs = _joined(segments), {job.id: job for job in problem.jobs}
        of_job: dict[str, list[int]] = {job_id: [] for job_id in jobs}
        for i, row in enumerate(rows):
            of_job[row.job].append(i)
        paid_s, least, held = [0.0] * len(rows), [0.0] * len(rows), [False] * len(rows)
        for job in problem.jobs:
            own_rows = of_job[job.id]
            for i in own_rows:
                held[i] = i == own_rows[0] and job.goes_on(rows[i].option, rows[i].start_s, rows[i].devices)
                paid_s[i] = overhead_s(
                    problem,
                    job,
                    job.options[rows[i].option],
                    is_first=i == own_rows[0],
                    is_last=i == own_rows[-1],
                    continues=held[i],
                )
                least[i] = max(paid_s[i], least_s if len(own_rows) > 1 else 0.0)
                if held[i] and len(own_rows) > 1 and job.running is not None:
                    least[i] = max(least[i], job.running.pinned_until_s)
        follows = tuple(sorted(set(_followers(problem, rows, of_job))))
        return cls(problem, jobs, rows, tuple(paid_s), tuple(least), tuple(held), of_job, follows)

    @property
    def keeps_pinned(self) -> bool:
        """Whether every pinned job continues what it is running."""
        return all(
            self.held_at_0[self.of_job[job_id][0]]
            for job_id, job in self.jobs.items()
            if job.running is not None and job.running.pinned_until_s > 0.0
        )

    def best_lengths_s(self, of: Coefficients) -> list[float] | None:
        """Returns the lengths of the segments in an optimum of the linear program; None where there is none."""
        num, lp = len(self.segments), LinearProgram()
        unit_s = max(sum(self.paid_s), *(self._runtime_s(i) for i in range(num)))
        unit_s = max(max(s.end_s for s in self.segments), unit_s / num)
        prices = [sum(of.prices.get(v, 0.0) * len(ids) for v, ids in s.devices) for s in self.segments]
        scale = of.per_second + max(prices) or 1.0
        starts = [lp.column(cost=TRIFLE / num) for _ in self.segments]
        lengths = [lp.column(cost=TRIFLE / num + price / scale) for price in prices]
        last = lp.column(cost=of.largest / scale or 10 * TRIFLE)
        for job_id, weight in of.ends.items():
            for column in (starts[self.of_job[job_id][-1]], lengths[self.of_job[job_id][-1]]):
                lp.costs[column] += weight / scale
        for job_id, job in self.jobs.items():
            own_rows, late = self.of_job[job_id], lp.column(cost=LATE)
            owed = 1.0 + sum(self.paid_s[i] / self._runtime_s(i) for i in own_rows)
            fastest_s = min(self._runtime_s(i) for i in own_rows)
            work = owed * fastest_s / unit_s
            lp.row(work, work, [(lengths[i], fastest_s / self._runtime_s(i)) for i in own_rows])
            if job.deadline_s is not None:
                lp.row(-math.inf, job.deadline_s / unit_s, [*_end(own_rows[-1], num), (late, -1.0)])
        for i, k in self.follows:
            lp.row(0.0, math.inf, [(starts[k], 1.0), (starts[i], -1.0), (lengths[i], -1.0)])
        nodes = {node.id: node for node in self.problem.nodes}
        for i, segment in enumerate(self.segments):
            lp.limits[starts[i]] = self.jobs[segment.job].release_s / unit_s, 0.0 if self.held_at_0[i] else math.inf
            lp.limits[lengths[i]] = self.least_s[i] / unit_s, math.inf
            factor = of.latest.get(segment.job, 0.0) / of.largest if of.largest else 1.0
            if factor:
                lp.row(0.0, math.inf, [(last, 1.0), (starts[i], -factor), (lengths[i], -factor)])
            untils = [u for v, _ in segment.devices if (u := nodes[v].available_until_s) is not None]
            if untils:
                lp.row(-math.inf, min(untils) / unit_s, _end(i, num))
        values = lp.values(tolerance=1e-9)
        return [values[length] * unit_s for length in lengths] if values else None

    def with_lengths(self, lengths_s: Sequence[float]) -> tuple[Segment, ...]:
        """Returns segments of about those lengths, each as early as the order allows.

        The segments of a job do exactly its whole work. This step removes the solver's tolerance: the shares of a job
        are scaled to 1, and starts follow from ends.
        """
        share = np.zeros(len(self.segments))
        for own_rows in self.of_job.values():
            done = [max(0.0, (lengths_s[i] - self.paid_s[i]) / self._runtime_s(i)) for i in own_rows]
            for i, work in zip(own_rows, done, strict=True):
                share[i] = work / sum(done) if sum(done) else 1.0 / len(own_rows)
        before: dict[int, list[int]] = {}
        for i, k in self.follows:
            before.setdefault(k, []).append(i)
        ends_s, timed = [0.0] * len(self.segments), []
        for i, segment in enumerate(self.segments):
            release_s = self.jobs[segment.job].release_s
            start_s = max([release_s, *(ends_s[k] for k in before.get(i, []))])
            ends_s[i] = start_s + self.paid_s[i] + float(share[i]) * self._runtime_s(i)
            timed.append(
                replace(segment, start_s=start_s, end_s=ends_s[i], work=float(share[i]), overhead_s=self.paid_s[i])
            )
        return tuple(sorted(timed, key=lambda s: (s.start_s, s.job)))

    def _runtime_s(self, i: int) -> float:
        segment = self.segments[i]
        return self.jobs[segment.job].options[segment.option].runtime_s


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Returns the segments by start; a segment that continues the job's previous one is joined to it."""
    rows: list[Segment] = []
    newest: dict[str, int] = {}
    for segment in sorted(segments, key=lambda s: (s.start_s, s.end_s, s.job)):
        i = newest.get(segment.job)
        if i is not None:
            a = rows[i]
            if a.option == segment.option and set(a.devices) == set(segment.devices) and segment.start_s <= a.end_s:
                rows[i] = replace(a, end_s=segment.end_s)
                continue
        newest[segment.job] = len(rows)
        rows.append(segment)
    return tuple(rows)


def _followers(problem: Problem, rows: Sequence[Segment], of_job: dict[str, list[int]]) -> Iterator[tuple[int, int]]:
    """Yields pairs of segments of which the second waits for the end of the first."""
    newest: dict[tuple[str, int], int] = {}
    for i, row in enumerate(rows):
        for v, ids in row.devices:
            for device in ids:
                if (v, device) in newest:
                    yield newest[v, device], i
                newest[v, device] = i
    for own_rows in of_job.values():
        yield from pairwise(own_rows)
    for job in problem.jobs:
        yield from ((of_job[other][-1], of_job[job.id][0]) for other in job.after)
    shares: dict[tuple[str, str], list[int]] = {}  # the segments that share a node's memory, or a limit
    memory = {node.id for node in problem.nodes if node.host_memory_bytes is not None}
    for i, row in enumerate(rows):
        job = problem.job(row.job)
        if job.user in problem.limits:
            shares.setdefault(("limit", job.user), []).append(i)
        if job.options[row.option].host_memory_bytes:
            for v, _ in row.devices:
                if v in memory:
                    shares.setdefault(("memory", v), []).append(i)
    for here in shares.values():  # those that do not overlap stay in order, so that no more of them run together
        for i in here:
            yield from ((i, k) for k in here if k > i and rows[k].start_s >= rows[i].end_s * (1 - SAME))


def _end(i: int, num: int) -> list[tuple[int, float]]:
    return [(i, 1.0), (num + i, 1.0)]


def exactly(
    problem: Problem, segments: Sequence[Segment], *, objective: Objective = MAKESPAN, least_s: float
) -> tuple[Segment, ...]:
    """Returns a plan with the best times that its structure allows; () where no times make it a valid plan.

    Segments are shorter than `least_s` where the structure allows no other times.
    """
    timed = retimed(problem, segments, objective=objective, least_s=least_s)
    return timed or retimed(problem, segments, objective=objective) or ()
