"""Planning: which technique, how many devices, when and where, for all jobs at once, and how good that is at
least.

`solve(problem)` gives a `Plan`; `verify(plan, problem)` checks it and its bound independently. Importing
this package
is light: solvers are imported when they are needed.
"""

from ringmaster.tasks.planning.certificates import certified_bound
from ringmaster.tasks.planning.plan import Certificate, Plan, Segment
from ringmaster.tasks.planning.problem import Node, Option, PlanningJob, Problem, ProblemError, Running
from ringmaster.tasks.planning.solve import solve
from ringmaster.tasks.planning.verify import verify

__all__ = [
    "Certificate",
    "Node",
    "Option",
    "Plan",
    "PlanningJob",
    "Problem",
    "ProblemError",
    "Running",
    "Segment",
    "certified_bound",
    "solve",
    "verify",
]
