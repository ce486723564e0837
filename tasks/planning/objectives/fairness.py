"""Fairness: how much later than on a fair share of its own the worst-off user or batch is done."""

from ringmaster.tasks.planning.objectives.objective import Coefficients, Objective
from ringmaster.tasks.planning.problems.problem import Problem


class Fairness(Objective):
    """The largest finish-time fairness rho of all groups (Mahajan et al., "Themis", NSDI 2020).

    rho of a group is the end of its last job, over the seconds in which it could do its jobs on 1/N of the devices for
    N groups (`problems.fair_share`). Up to 1, no group would gain from a cluster of its own.
    """

    name = "fairness"
    trains_alone = True

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns 1 / fair seconds of the job's group, in the maximum."""
        return Coefficients(latest={job: 1.0 / fair_s for job, fair_s in problem.fair_s.items()})
