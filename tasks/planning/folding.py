"""Start-up, save and evaluation seconds folded into runtimes, so that the compiled searches need not know them.

A job in one segment takes exactly the folded runtime. One in several pays start-up and save again at each switch: the
folded switch cost. Only how these seconds fall among the segments of a job is approximate, and `retiming` makes the
plan that is found exact again.
"""

from dataclasses import replace
from statistics import median

from tasks.planning.overheads import overhead_s
from tasks.planning.plan import Segment
from tasks.planning.problem import Option, PlanningJob, Problem


def has_fixed_seconds(problem: Problem) -> bool:
    """Whether some option pays seconds besides its runtime."""
    return any(o.startup_s or o.save_s or o.evaluate_s for job in problem.jobs for o in job.options)


def folded(problem: Problem) -> Problem:
    """The problem without fixed seconds that takes the same time, job by job, where jobs do not switch."""
    again_s = median(median(o.startup_s + o.save_s for o in job.options) for job in problem.jobs)
    jobs = tuple(
        replace(job, options=tuple(_folded(problem, job, option) for option in job.options)) for job in problem.jobs
    )
    return replace(problem, jobs=jobs, switch_cost_s=problem.switch_cost_s + again_s)


def _folded(problem: Problem, job: PlanningJob, option: Option) -> Option:
    return replace(option, runtime_s=option.whole_s, startup_s=0.0, save_s=0.0, evaluate_s=0.0)


def unfolded(problem: Problem, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Segments of the folded problem's plan with one segment a job, as the problem itself counts their seconds."""
    jobs = {job.id: job for job in problem.jobs}
    return tuple(
        replace(
            s,
            overhead_s=s.overhead_s
            + overhead_s(problem, jobs[s.job], jobs[s.job].options[s.option], is_first=True, is_last=True),
        )
        for s in segments
    )
