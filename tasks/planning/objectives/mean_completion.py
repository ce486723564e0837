"""Mean completion: the mean of the ends of all jobs."""

from ringmaster.tasks.planning.objectives.objective import Coefficients, Objective
from ringmaster.tasks.planning.problems.problem import Problem


class MeanCompletion(Objective):
    """The mean of the ends of all jobs; the jobs of a fused group count each."""

    name = "mean_completion"

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns equal shares of 1 for all jobs."""
        counts = {job.id: 1 + len(job.members) for job in problem.jobs}
        total = sum(counts.values())
        return Coefficients(ends={job: count / total for job, count in counts.items()})
