"""Plans by two objectives: of those that keep the ends of the first one, the best by the second."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.objectives import ends_of, objective_by_name
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem

LATER = 1.01  # times its end a job may take for the sake of the second objective


def plan_by_two(problem: Problem, *, first: str, second: str, make_plan: Callable[..., Plan]) -> Plan:
    """Returns a plan whose jobs with a weight end as by the first objective; the rest is planned by the second one.

    This is the method of bounds on all objectives but one (Haimes et al., 1971), with the end of each job as a bound.
    Budgets are given up before an end. The plan has the value and the bounds of the first objective.

    make_plan: plans a problem for an `objective`. Raises ProblemError as `solve` does.
    """
    soon = make_plan(replace(problem, budgets={}), objective=first)
    ends_s = ends_of(soon, problem)
    jobs = tuple(
        replace(job, deadline_s=min(math.inf if job.deadline_s is None else job.deadline_s, ends_s[job.id] * LATER))
        if job.weight
        else job
        for job in problem.jobs
    )
    plan_rest = partial(make_plan, objective=second)
    for budgets in [problem.budgets, {}] if problem.budgets else [{}]:
        with suppress(ProblemError):
            plan = plan_rest(replace(problem, jobs=jobs, budgets=budgets))
            value = objective_by_name(first).value(plan, problem)
            least = None if soon.value_bound is None else min(soon.value_bound, value)
            return replace(soon, segments=plan.segments, value=value, value_bound=least)
    return soon
