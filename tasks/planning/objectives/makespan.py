"""The makespan: the end of the last job."""

from ringmaster.tasks.planning.bounds.bounds import Bound, ValueBound
from ringmaster.tasks.planning.objectives.objective import Coefficients, Objective
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem


class Makespan(Objective):
    """The end of the last job. Every plan has its makespan and the lower bound, so it needs no further value."""

    name = "makespan"
    only_last_end = True

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns 1 for each job in the maximum."""
        return Coefficients(latest={job.id: 1.0 for job in problem.jobs})

    def value(self, plan: Plan, problem: Problem) -> float:
        """Returns the makespan of the plan."""
        return plan.makespan_s

    def lower_bound(self, problem: Problem, bound: Bound) -> float:
        """Returns the bound on the end of the last job."""
        return bound.seconds

    def valued(self, plan: Plan, problem: Problem, bound: Bound, *, best: ValueBound | None = None) -> Plan:
        """Returns the plan as it is."""
        return plan


MAKESPAN = Makespan()
