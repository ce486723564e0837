"""Folds start-up, save and evaluation seconds into runtimes, so that the compiled searches need not model them.

A job in one segment takes exactly the folded runtime. A job in several segments pays start-up and save again at each
switch, which is the folded switch cost. Only the distribution of these seconds over the segments of a job is
approximate; `retiming` makes the resulting plan exact again.
"""

from dataclasses import replace
from statistics import median

from ringmaster.tasks.planning.problems.parts import Option, PlanningJob
from ringmaster.tasks.planning.problems.problem import Problem


def is_foldable(problem: Problem) -> bool:
    """Whether the problem would be plain but for seconds beside runtimes and jobs that run at time 0."""
    return (
        not problem.is_fused
        and not any(job.after or job.release_s or job.deadline_s is not None for job in problem.jobs)
        and not any(node.available_until_s is not None or node.host_memory_bytes is not None for node in problem.nodes)
    )


def folded(problem: Problem) -> Problem:
    """Returns a problem without overheads in which every job that does not switch takes the same time."""
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
