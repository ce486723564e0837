"""Overhead of a segment: the seconds of start-up, save, evaluation and switch, which do no work."""

from ringmaster.tasks.planning.problems.parts import Option, PlanningJob
from ringmaster.tasks.planning.problems.problem import Problem


def overhead_s(
    problem: Problem, job: PlanningJob, option: Option, *, is_first: bool, is_last: bool, continues: bool = False
) -> float:
    """Returns the seconds of a job's segment that do no work.

    continues: the segment continues what the job is running at time 0.
    """
    paid_s = option.save_s + (option.evaluate_s if is_last else 0.0)
    if continues:
        return paid_s
    return paid_s + option.startup_s + (0.0 if is_first and not job.started else problem.switch_cost_s)
