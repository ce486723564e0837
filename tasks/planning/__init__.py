"""Joint planning of a batch: technique, number of devices, start time and devices of every job, with a lower bound.

`solve(problem)` returns a `Plan`. `verify(plan, problem)` checks the plan and its bound independently of the planner.
The import is light: solvers are imported when they are first needed.
"""

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.bounds.bounds import certified_bound
from ringmaster.tasks.planning.objectives import Coefficients, Objective
from ringmaster.tasks.planning.plans.plan import Certificate, Plan, Segment
from ringmaster.tasks.planning.plans.verify import verify
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun, Option, PlanningJob, PlanningNode
from ringmaster.tasks.planning.solve import solve

__all__ = [
    "Certificate",
    "Coefficients",
    "CurrentRun",
    "Objective",
    "Option",
    "Plan",
    "PlanningJob",
    "PlanningNode",
    "Problem",
    "ProblemError",
    "Segment",
    "certified_bound",
    "solve",
    "verify",
]
