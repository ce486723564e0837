"""Planning terms of a batch: objective, deadlines, weights and the price of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class PlanningTerms:
    """The objective of plans and the constraints that they must meet.

    objective: the name of the objective, as in `solve`.
    deadlines_s: by job, in seconds from the start of the batch.
    weights: by job; 1 for jobs that are not named.
    users: by job, whose job it is; jobs that are not named are groups of their own.
    price_per_device_hour: price of any device, in any currency; at 1, a cost is in device-hours.
    """

    objective: str = "makespan"
    deadlines_s: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    price_per_device_hour: float = 1.0

    def on(self, problem: Problem, *, elapsed_s: float = 0.0) -> Problem:
        """Returns the problem under these terms, with its time 0 `elapsed_s` seconds after the start of the batch.

        Nodes get the price where the objective depends on prices. A deadline that has passed becomes one of 0 s, which
        no plan meets. A job that stands for several has the earliest of their deadlines and the sum of their weights.
        """
        jobs = tuple(
            replace(
                job,
                deadline_s=self._due_s((job.id, *job.members), elapsed_s=elapsed_s),
                weight=sum(self.weights.get(name, 1.0) for name in (job.id, *job.members)),
                group=self.users.get(job.id, ""),
            )
            for job in problem.jobs
        )
        is_paid = bool(objective_by_name(self.objective).coefficients(problem).prices)
        nodes = tuple(
            replace(node, price=self.price_per_device_hour / HOUR_S if is_paid else node.price)
            for node in problem.nodes
        )
        return replace(problem, jobs=jobs, nodes=nodes)

    def _due_s(self, jobs: Sequence[str], *, elapsed_s: float) -> float | None:
        due_s = [self.deadlines_s[name] for name in jobs if name in self.deadlines_s]
        return max(0.0, min(due_s) - elapsed_s) if due_s else None


def plan_giving_up_deadlines(problem: Problem, make_plan: Callable[[Problem], Plan]) -> tuple[Plan, tuple[str, ...]]:
    """Returns a plan that drops as few deadlines as possible, and the jobs whose deadlines were dropped.

    The function is for a batch that is already running, which a crash or a wrong prediction must not stop. The earliest
    deadlines are dropped first, since those are the ones that time has overtaken; bisection finds how many. `make_plan`
    raises ProblemError where it cannot meet all deadlines. The function passes that error on where the problem has no
    deadlines.
    """
    dated = sorted((job.deadline_s, job.id) for job in problem.jobs if job.deadline_s is not None)
    names = tuple(name for _, name in dated)
    try:
        return make_plan(problem), ()
    except ProblemError:
        if not names:
            raise
    least, most = 1, len(names)
    best = make_plan(without_deadlines(problem, names))
    while least < most:
        middle = (least + most) // 2
        try:
            best, most = make_plan(without_deadlines(problem, names[:middle])), middle
        except ProblemError:
            least = middle + 1
    return best, names[:most]


def without_deadlines(problem: Problem, names: tuple[str, ...]) -> Problem:
    """Returns the problem without the deadlines of the named jobs."""
    given_up = set(names)
    jobs = tuple(replace(job, deadline_s=None) if job.id in given_up else job for job in problem.jobs)
    return replace(problem, jobs=jobs)
