"""Why deadlines cannot be met: which jobs conflict, and by how much."""

from collections.abc import Iterator
from dataclasses import replace

from tasks.planning.bounds import earliest_ends_s, preemptive_bound
from tasks.planning.problem import Problem


def conflicts(problem: Problem) -> Iterator[str]:
    """Deadlines that no plan can meet, each with the proof's seconds; nothing where none is proved impossible.

    A job alone: its release, the jobs that it waits for and its fastest option. Jobs together: the lower bound of all
    jobs that are due by some time.
    """
    ends = earliest_ends_s(problem)
    alone = [job for job in problem.jobs if job.deadline_s is not None and ends[job.id] > job.deadline_s]
    for job in alone:
        yield (
            f"job {job.id}: cannot end before {ends[job.id]:.1f} s, its deadline is {job.deadline_s} s: "
            f"{ends[job.id] - (job.deadline_s or 0.0):.1f} s too late"
        )
    if alone:
        return
    for due_s in sorted({job.deadline_s for job in problem.jobs if job.deadline_s is not None}):
        jobs = [job for job in problem.jobs if job.deadline_s is not None and job.deadline_s <= due_s]
        known = {job.id for job in jobs}
        own = tuple(replace(job, after=tuple(other for other in job.after if other in known)) for job in jobs)
        needed_s = preemptive_bound(replace(problem, jobs=own)).seconds
        if needed_s > due_s * (1 + 1e-9):
            names = ", ".join(job.id for job in jobs)
            yield (
                f"jobs {names}: cannot all end by {due_s} s: together they need at least {needed_s:.1f} s, "
                f"{needed_s - due_s:.1f} s more"
            )
            return
