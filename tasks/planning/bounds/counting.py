"""Lower bound by counting, for equal jobs that are not split: 3 equal jobs on 2 devices take 2 runs, not 1.5.

A job under an option of g devices counts 1/g on each of them, so all J jobs together count J on the D devices, and at
least one device carries J/D. The shortest sequence of runs on one device that reaches this count ends no later than any
plan without preemption.
"""

import math

from ringmaster.tasks.planning.problems.parts import Option, PlanningJob
from ringmaster.tasks.planning.problems.problem import Problem

COUNTING = "counting equal jobs"
"""Name of the proof in plans."""

MAX_UNITS = 100_000  # size limit of the table; beyond it the bound is 0


def counted_bound_s(problem: Problem) -> float:
    """Returns a lower bound in seconds on plans without preemption of equal jobs; 0 where the jobs are not equal."""
    shapes = {_shape(job) for job in problem.jobs}
    if len(shapes) != 1 or problem.is_fused or any(job.started for job in problem.jobs):
        return 0.0
    options = problem.jobs[0].options
    per_job = math.lcm(*(option.num_devices for option in options))
    needed = -(-len(problem.jobs) * per_job // problem.num_devices)
    if needed > MAX_UNITS:
        return 0.0
    runs = {per_job // option.num_devices: math.inf for option in options}
    for option in options:
        units = per_job // option.num_devices
        runs[units] = min(runs[units], option.whole_s)
    least_s = [0.0]
    for count in range(1, needed + 1):
        least_s.append(min(least_s[max(0, count - units)] + seconds for units, seconds in runs.items()))
    return least_s[needed]


def _shape(job: PlanningJob) -> frozenset[tuple[object, ...]]:
    return frozenset(_seconds_of(option) for option in job.options)


def _seconds_of(option: Option) -> tuple[object, ...]:
    return (option.num_devices, option.num_nodes, option.device_type, option.host_memory_bytes, option.whole_s)
