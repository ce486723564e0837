"""Start-up, save and evaluation seconds folded into runtimes, so that the compiled searches need not know them.

A job in one segment takes exactly the folded runtime. One in several pays start-up and save again at each switch: the
folded switch cost. Only how these seconds fall among the segments of a job is approximate, and `retiming` makes the
plan that is found exact again.
"""

from dataclasses import replace
from statistics import median

from ringmaster.tasks.planning.problem import Option, PlanningJob, Problem


def is_foldable(problem: Problem) -> bool:
    """Whether seconds besides runtimes, and what runs already, are all that makes the problem less than plain."""
    return (
        not problem.is_fused
        and not any(job.after or job.release_s or job.deadline_s is not None for job in problem.jobs)
        and not any(node.available_until_s is not None or node.host_memory_bytes is not None for node in problem.nodes)
    )


def folded(problem: Problem) -> Problem:
    """The problem without fixed seconds that takes the same time, job by job, where jobs do not switch."""
    if not any(o.startup_s or o.save_s or o.evaluate_s for job in problem.jobs for o in job.options):
        return problem
    again_s = median(o.startup_s + o.save_s for job in problem.jobs for o in job.options)
    jobs = tuple(
        replace(job, options=tuple(_folded(job, k, option) for k, option in enumerate(job.options)))
        for job in problem.jobs
    )
    return replace(problem, jobs=jobs, switch_cost_s=problem.switch_cost_s + again_s)


def _folded(job: PlanningJob, k: int, option: Option) -> Option:
    goes_on = job.running is not None and k == job.running.option
    whole_s = option.whole_s - (option.startup_s if goes_on else 0.0)
    return replace(option, runtime_s=whole_s, startup_s=0.0, save_s=0.0, evaluate_s=0.0)
