"""Weighted completion: the sum of weight x end over all jobs."""

from ringmaster.tasks.planning.objectives.objective import Coefficients, Objective
from ringmaster.tasks.planning.problems.problem import Problem


class WeightedCompletion(Objective):
    """The sum of weight x end over all jobs."""

    name = "weighted"

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns the weight of each job."""
        return Coefficients(ends={job.id: job.weight for job in problem.jobs})
