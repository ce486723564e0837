"""The order of jobs that wait for others, and how early each could start and end."""

from collections.abc import Iterator

from ringmaster.tasks.planning.bounds.job_costs import shortest_of
from ringmaster.tasks.planning.problems.parts import PlanningJob
from ringmaster.tasks.planning.problems.problem import Problem


def in_order(problem: Problem) -> Iterator[PlanningJob]:
    """Yields the jobs in a topological order: each job after those that it waits for."""
    done: set[str] = set()
    left = list(problem.jobs)
    while left:
        ready = [job for job in left if all(other in done for other in job.after)]
        yield from ready
        done |= {job.id for job in ready}
        left = [job for job in left if job.id not in done]


def earliest_ends_s(problem: Problem) -> dict[str, float]:
    """Returns when each job could end if it had all devices to itself, by job id.

    A job starts at its release or at the latest end of the jobs that it waits for, and runs under its fastest option.
    """
    heads_s, shortest = earliest_starts_s(problem), shortest_of(problem)
    return {job: head_s + shortest[job] for job, head_s in heads_s.items()}


def earliest_starts_s(problem: Problem) -> dict[str, float]:
    """Returns when each job could start if every job had all devices to itself, by job id."""
    starts: dict[str, float] = {}
    shortest = shortest_of(problem)
    for job in in_order(problem):
        starts[job.id] = max([job.release_s, *(starts[other] + shortest[other] for other in job.after)])
    return starts
