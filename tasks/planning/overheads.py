"""The seconds of a segment that do no work: start-up, save, evaluation and the switch."""

from ringmaster.tasks.planning.problem import Option, PlanningJob, Problem


def overhead_s(
    problem: Problem, job: PlanningJob, option: Option, *, is_first: bool, is_last: bool, continues: bool = False
) -> float:
    """Seconds of a job's segment that do no work.

    continues: the job runs there already when the plan begins, and goes on.
    """
    paid_s = option.save_s + (option.evaluate_s if is_last else 0.0)
    if continues:
        return paid_s
    return paid_s + option.startup_s + (0.0 if is_first and not job.started else problem.switch_cost_s)
