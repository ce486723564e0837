"""Restriction of a problem to some of its jobs."""

from collections.abc import Collection
from dataclasses import replace

from ringmaster.tasks.planning.problems.parts import Option
from ringmaster.tasks.planning.problems.problem import Problem


def only(problem: Problem, names: Collection[str]) -> Problem:
    """Returns the problem restricted to some of its jobs.

    An option that trains several jobs is assigned to the first one that is left. Jobs no longer wait for those that are
    left out.
    """
    options: dict[str, list[Option]] = {job.id: [] for job in problem.jobs if job.id in names}
    for job in problem.jobs:
        for option in job.options:
            left = [name for name in (job.id, *option.jobs) if name in names]
            if left:
                options[left[0]].append(replace(option, jobs=tuple(left[1:])))
    jobs = []
    for job in problem.jobs:
        if job.id in names:
            after = tuple(other for other in job.after if other in names)
            kept = replace(job, options=tuple(options[job.id]), after=after)
            # The index of a running option is invalid once options are moved.
            jobs.append(replace(kept, running=None, started=False) if problem.is_fused else kept)
    return replace(problem, jobs=tuple(jobs))
