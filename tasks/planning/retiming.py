"""The best times of a plan whose gangs and their order are given: a linear program, exact in every second that is paid.

A plan's *structure* is which segments there are, on which devices, and which comes after which on a device or of a
job. Searches decide on structures with times that are roughly right; this decides how long each segment lasts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ringmaster.tasks.planning.overheads import overhead_s
from ringmaster.tasks.planning.plan import Segment
from ringmaster.tasks.planning.problem import PlanningJob, Problem

LATE = 1e3  # what a second of lateness counts, in seconds of the objective
TRIFLE = 1e-6  # weight of what is preferred among equals: early ends


def retimed(
    problem: Problem, segments: Sequence[Segment], *, objective: str = "makespan", least_s: float = 0.0
) -> tuple[Segment, ...] | None:
    """The segments in the same order, on the same devices, with the times that are best for the objective.

        min T  (or sum weight end, or sum price devices seconds)  +  much lateness  +  a trifle of all ends
        work       sum_i (end_i - start_i - overhead_i) / runtime_i = 1           over the segments i of each job
        order      start_k >= end_i         where k follows i on a device, of a job, by `after`, in a full host memory
        length     end_i - start_i >= overhead_i, and >= least_s for jobs with several segments
        windows    start >= release, end <= deadline + late, end <= the node's last second, end <= T

    Times of the argument matter only by their order. Returns None where no times do all of that.
    """
    structure = _Structure.of(problem, segments, least_s)
    if not structure.keeps_pinned:
        return None
    lengths_s = structure.best_lengths_s(objective)
    return None if lengths_s is None else structure.with_lengths(lengths_s)


def with_fewer(
    problem: Problem,
    segments: tuple[Segment, ...],
    *,
    objective: str,
    least_s: float,
    worth: float,
    num_trials: int = 40,
) -> tuple[Segment, ...]:
    """The retimed segments without those that gain less than `worth` (a share of the objective), shortest first."""
    from ringmaster.tasks.planning.local_search import value

    tried: set[tuple[str, int]] = set()
    for _ in range(num_trials):
        several = [s for s in segments if sum(other.job == s.job for other in segments) > 1]
        several = [s for s in several if (s.job, s.option) not in tried]
        if not several:
            break
        least = min(several, key=lambda s: (s.duration_s * sum(len(ids) for _, ids in s.devices), s.job, s.start_s))
        tried.add((least.job, least.option))
        found = retimed(problem, [s for s in segments if s is not least], objective=objective, least_s=least_s)
        if found is None:
            continue
        late_s, reached = value(found, problem, objective)
        late_before_s, before = value(segments, problem, objective)
        if late_s <= late_before_s and reached <= before * (1 + worth):
            segments = found
    return segments


@dataclass(frozen=True)
class _Structure:
    """Segments by start, what each pays and at least lasts, and who follows whom: pairs (before, behind)."""

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
        """The structure of a plan; segments that go on without a pause are one."""
        rows, jobs = _joined(segments), {job.id: job for job in problem.jobs}
        of_job: dict[str, list[int]] = {job_id: [] for job_id in jobs}
        for i, row in enumerate(rows):
            of_job[row.job].append(i)
        paid_s, least, held = [0.0] * len(rows), [0.0] * len(rows), [False] * len(rows)
        for job in problem.jobs:
            mine = of_job[job.id]
            for i in mine:
                held[i] = i == mine[0] and job.goes_on(rows[i].option, rows[i].start_s, rows[i].devices)
                paid_s[i] = overhead_s(
                    problem,
                    job,
                    job.options[rows[i].option],
                    is_first=i == mine[0],
                    is_last=i == mine[-1],
                    continues=held[i],
                )
                least[i] = max(paid_s[i], least_s if len(mine) > 1 else 0.0)
                if held[i] and len(mine) > 1 and job.running is not None:
                    least[i] = max(least[i], job.running.pinned_until_s)
        follows = tuple(sorted(set(_followers(problem, rows, of_job))))
        return cls(problem, jobs, rows, tuple(paid_s), tuple(least), tuple(held), of_job, follows)

    @property
    def keeps_pinned(self) -> bool:
        """Whether every pinned job goes on with what it does."""
        return all(
            self.held_at_0[self.of_job[job_id][0]]
            for job_id, job in self.jobs.items()
            if job.running is not None and job.running.pinned_until_s > 0.0
        )

    def best_lengths_s(self, objective: str) -> list[float] | None:
        """The lengths of the segments in an optimum of the linear program; None where there is none."""
        import highspy

        num, infinity = len(self.segments), highspy.kHighsInf
        unit_s = max(sum(self.paid_s), *(self._runtime_s(i) for i in range(num)))
        unit_s = max(max(s.end_s for s in self.segments), unit_s / num)
        # Columns: start of each segment, length of each, the last end, lateness of each job.
        last, late = 2 * num, {job_id: 2 * num + 1 + j for j, job_id in enumerate(self.jobs)}
        rows: list[tuple[float, float, list[tuple[int, float]]]] = []
        for job_id, job in self.jobs.items():
            mine = self.of_job[job_id]
            owed = 1.0 + sum(self.paid_s[i] / self._runtime_s(i) for i in mine)
            fastest_s = min(self._runtime_s(i) for i in mine)
            row = [(num + i, fastest_s / self._runtime_s(i)) for i in mine]
            rows.append((owed * fastest_s / unit_s, owed * fastest_s / unit_s, row))
            if job.deadline_s is not None:
                rows.append((-infinity, job.deadline_s / unit_s, [*_end(mine[-1], num), (late[job_id], -1.0)]))
        for i, k in self.follows:
            rows.append((0.0, infinity, [(k, 1.0), (i, -1.0), (num + i, -1.0)]))
        nodes = {node.id: node for node in self.problem.nodes}
        for i, segment in enumerate(self.segments):
            rows.append((0.0, infinity, [(last, 1.0), (i, -1.0), (num + i, -1.0)]))
            untils = [u for v, _ in segment.devices if (u := nodes[v].available_until_s) is not None]
            if untils:
                rows.append((-infinity, min(untils) / unit_s, _end(i, num)))
        cost = np.zeros(2 * num + 1 + len(self.jobs))
        cost[last], cost[last + 1 :] = 1.0 if objective == "makespan" else 10 * TRIFLE, LATE
        cost[: 2 * num] += TRIFLE / num
        if objective == "weighted":
            for job_id, job in self.jobs.items():
                i = self.of_job[job_id][-1]
                cost[[i, num + i]] += job.weight / len(self.jobs)
        elif objective == "cost":
            prices = [sum(nodes[v].price * len(ids) for v, ids in s.devices) for s in self.segments]
            cost[num : 2 * num] += np.array(prices) / (max(prices) or 1.0)
        lower, upper = np.zeros(cost.size), np.full(cost.size, infinity)
        lower[num : 2 * num] = np.array(self.least_s) / unit_s
        for i, segment in enumerate(self.segments):
            lower[i] = self.jobs[segment.job].release_s / unit_s
            if self.held_at_0[i]:
                upper[i] = 0.0
        found = _solved(cost, lower, upper, rows)
        return None if found is None else [float(x) * unit_s for x in found[num : 2 * num]]

    def with_lengths(self, lengths_s: Sequence[float]) -> tuple[Segment, ...]:
        """Segments of about those lengths, each as early as the order allows, whose work is exactly all of the job's.

        The solver's tolerance ends here: shares of a job are scaled to 1, and starts follow from ends.
        """
        share = np.zeros(len(self.segments))
        for mine in self.of_job.values():
            done = [max(0.0, (lengths_s[i] - self.paid_s[i]) / self._runtime_s(i)) for i in mine]
            for i, work in zip(mine, done, strict=True):
                share[i] = work / sum(done) if sum(done) else 1.0 / len(mine)
        before: dict[int, list[int]] = {}
        for i, k in self.follows:
            before.setdefault(k, []).append(i)
        ends_s, found = [0.0] * len(self.segments), []
        for i, segment in enumerate(self.segments):
            release_s = self.jobs[segment.job].release_s
            start_s = max([release_s, *(ends_s[k] for k in before.get(i, []))])
            ends_s[i] = start_s + self.paid_s[i] + float(share[i]) * self._runtime_s(i)
            found.append(
                replace(segment, start_s=start_s, end_s=ends_s[i], work=float(share[i]), overhead_s=self.paid_s[i])
            )
        return tuple(sorted(found, key=lambda s: (s.start_s, s.job)))

    def _runtime_s(self, i: int) -> float:
        segment = self.segments[i]
        return self.jobs[segment.job].options[segment.option].runtime_s


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Segments by start; one that goes on where the job's last one stopped is joined to it."""
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
    """Pairs of segments of which the second waits for the first's end."""
    newest: dict[tuple[str, int], int] = {}
    for i, row in enumerate(rows):
        for v, ids in row.devices:
            for device in ids:
                if (v, device) in newest:
                    yield newest[v, device], i
                newest[v, device] = i
    for mine in of_job.values():
        yield from pairwise(mine)
    for job in problem.jobs:
        yield from ((of_job[other][-1], of_job[job.id][0]) for other in job.after)
    jobs = {job.id: job for job in problem.jobs}
    full = {node.id for node in problem.nodes if node.host_memory_bytes is not None}
    for v in sorted(full):
        here = [i for i, row in enumerate(rows) if any(name == v for name, _ in row.devices)]
        here = [i for i in here if jobs[rows[i].job].options[rows[i].option].host_memory_bytes]
        for i in here:
            yield from ((i, k) for k in here if rows[k].start_s >= rows[i].end_s and k > i)


def _end(i: int, num: int) -> list[tuple[int, float]]:
    return [(i, 1.0), (num + i, 1.0)]


def _solved(
    cost: Any, lower: Any, upper: Any, rows: Sequence[tuple[float, float, list[tuple[int, float]]]]
) -> Any | None:
    """An optimum of min cost x, lower <= x <= upper, rows of (least, most, coefficients); None without one."""
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = cost.size, len(rows)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
    lp.row_lower_ = np.array([row[0] for row in rows])
    lp.row_upper_ = np.array([row[1] for row in rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(row[2]) for row in rows)], dtype=np.int32)
    lp.a_matrix_.index_ = np.array([column for row in rows for column, _ in row[2]], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([x for row in rows for _, x in row[2]])
    highs = highspy.Highs()
    settings = (("output_flag", False), ("threads", 1), ("random_seed", 0), ("primal_feasibility_tolerance", 1e-9))
    for name, setting in settings:
        highs.setOptionValue(name, setting)
    highs.passModel(lp)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return highs.getSolution().col_value
