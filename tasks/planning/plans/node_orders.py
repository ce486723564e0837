"""Plans without preemption as the order in which each node starts its jobs."""

from collections.abc import Sequence
from dataclasses import replace

from ringmaster.tasks.planning.bounds.job_costs import whole_of
from ringmaster.tasks.planning.plans.list_scheduling import Choice, DeviceTimeline
from ringmaster.tasks.planning.plans.plan import Segment
from ringmaster.tasks.planning.problems.parts import Option, PlanningJob
from ringmaster.tasks.planning.problems.problem import Problem

Order = tuple[Choice, ...]  # (job's id, index of its option), in the order of their starts on one node


def without_overheads(problem: Problem) -> Problem | None:
    """Returns the problem with all that a job in one segment pays added to its runtimes; options keep their indices.

    Jobs that run at time 0 continue on their devices. Returns None where more than runtimes decides when and where a
    job can run: jobs that wait, releases, deadlines, nodes with limited availability or host memory, fused groups.
    """
    if problem.is_fused or any(job.after or job.release_s or job.deadline_s is not None for job in problem.jobs):
        return None
    if any(node.available_until_s is not None or node.host_memory_bytes is not None for node in problem.nodes):
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


def segments_of(problem: Problem, orders: Sequence[Order]) -> tuple[Segment, ...]:
    """Returns the plan in which node v starts the jobs of orders[v] in that order, each as early as it can.

    Jobs that run at time 0 are in no order: they continue on their devices. Gangs are on one node.
    """
    jobs, timeline, segments = {job.id: job for job in problem.jobs}, DeviceTimeline(problem), []
    for job in problem.jobs:
        if job.running is not None:
            k = job.running.option
            whole_s = whole_of(job, k, problem.switch_cost_s)
            timeline.hold(job.options[k], job.running.devices, whole_s)
            overhead_s = whole_s - job.options[k].runtime_s
            segments.append(Segment(job.id, k, 0.0, whole_s, 1.0, overhead_s, job.running.devices))
    for v, order in enumerate(orders):
        for job_id, k in order:
            option = jobs[job_id].options[k]
            whole_s = whole_of(jobs[job_id], k, problem.switch_cost_s)
            start_s = timeline.earliest_on(option, v)
            gang = timeline.take(option, start_s, [v], whole_s)
            overhead_s = whole_s - option.runtime_s
            segments.append(Segment(job_id, k, start_s, start_s + whole_s, 1.0, overhead_s, gang))
    return tuple(sorted(segments, key=lambda s: (s.start_s, s.job)))
