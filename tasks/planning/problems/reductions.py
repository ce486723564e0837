"""Simpler problems: overheads folded into runtimes, and the restriction to some jobs.

Start-up, save and evaluation seconds are folded into runtimes, so that the compiled searches need not model them. A
job in one segment takes exactly the folded runtime. A job in several segments pays start-up and save again at each
switch, which is the folded switch cost. Only the distribution of these seconds over the segments of a job is
approximate; `retiming` makes the resulting plan exact again.
"""

from collections.abc import Collection
from dataclasses import replace
from statistics import median

from ringmaster.tasks.planning.bounds.job_costs import whole_of
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob


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


def without_overheads(problem: Problem) -> Problem | None:
    """Returns the problem with all that a job in one segment pays added to its runtimes; options keep their indices.

    Jobs that run at time 0 continue on their devices. Returns None where more than runtimes decides when and where a
    job can run: jobs that wait, releases, deadlines, nodes with limited availability or host memory, fused groups.
    """
    if not is_foldable(problem):
        return None

    def bare(job: PlanningJob) -> PlanningJob:
        options = (
            Option(
                o.technique,
                o.num_devices,
                whole_of(job, k, problem.switch_cost_s),
                o.num_nodes,
                o.config,
                o.device_type,
            )
            for k, o in enumerate(job.options)
        )
        return PlanningJob(job.id, tuple(options))

    return replace(problem, jobs=tuple(map(bare, problem.jobs)))
