"""Objectives: what plans minimise. The value of a plan, a lower bound of it, and the ranking of plans.

The value of a plan is linear in the ends of its jobs and in the device-seconds for which it holds each node:

    value  =  max_j latest_j end_j  +  sum_j ends_j end_j  +  sum_n prices_n held_n

An objective gives these coefficients for a problem. Everything that plans, compares or bounds plans follows from them:
list schedules, annealing over lists, retiming, replanning, and the lower bound. Installed packages add objectives by
entry points `ringmaster.objectives`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from ringmaster import features
from ringmaster.codec import SINCE_LATER, stored_features
from ringmaster.errors import ProblemError
from ringmaster.registry import Registry
from ringmaster.tasks.planning.bounds import bounds
from ringmaster.tasks.planning.bounds.due_dates import best_latest_bound, latest_bound
from ringmaster.tasks.planning.plans.plan import Certificate, Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.term_features import PastUse, TermsFeature, terms_feature
from ringmaster.tasks.planning.work import WorkBudget

TIME_TO_TARGET = "time-to-target"
"""The objective under which jobs may change what they list under `may_vary`."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The coefficients of a plan's value; all are at least 0, and those that are left out are 0.

    latest: by job, the factor of its end in the maximum over the jobs.
    ends: by job, what each second adds by which the job ends later.
    prices: by node, the price of one of its devices for one second.
    """

    latest: Mapping[str, float] = field(default_factory=dict)
    ends: Mapping[str, float] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        """The largest of `latest`; 0 where there are none."""
        return max(self.latest.values(), default=0.0)

    @property
    def per_second(self) -> float:
        """What each second adds by which all jobs end later."""
        return self.largest + sum(self.ends.values())

    def value(self, ends_s: Mapping[str, float], held: Iterable[tuple[str, float]] = ()) -> float:
        """Returns the value of a plan.

        ends_s: the end of each job.
        held: nodes, and device-seconds that are held there.
        """
        last = max((factor * ends_s.get(job, 0.0) for job, factor in self.latest.items()), default=0.0)
        weighted = sum(weight * ends_s.get(job, 0.0) for job, weight in self.ends.items())
        return last + weighted + sum(device_s * self.prices.get(node, 0.0) for node, device_s in held)

    def in_seconds(
        self, ends_s: Mapping[str, float], held_s: Mapping[str, float], *, num_devices: Mapping[str, int]
    ) -> float:
        """Returns a value in seconds: it is the same if all these jobs end then, and all devices are held until then.

        The result is the last end where all coefficients of these ends and devices are 0.

        held_s: by node, the device-seconds that are held there.
        num_devices: by node.
        """
        total = max((self.latest.get(job, 0.0) for job in ends_s), default=0.0)
        total += sum(self.ends.get(job, 0.0) for job in ends_s)
        total += sum(price * num_devices.get(node, 0) for node, price in self.prices.items())
        return self.value(ends_s, held_s.items()) / total if total else max(ends_s.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """How an objective's own search is limited: as in `solve`, with a minimum length of segments in seconds."""

    work: WorkBudget
    seed: int
    preemption: Literal["auto", "never", "always"]
    least_segment_s: float
    enough: float


class Objective(ABC):
    """What plans minimise. Meeting deadlines comes before every objective.

    A subclass has a `name` and gives the `coefficients`; it has no state.

    name: its name in batch files, plans and options.
    only_last_end: the value is the end of the last job. The searches for that end apply, such as the configuration LP.
    trains_alone: jobs are never trained together, as the value depends on what each of them takes alone.
    keeps_budgets: plans keep the budgets of the problem, which `faults` checks.
    may_wait: jobs may wait for a better time, as far as their deadlines allow it.
    """

    name: str
    only_last_end: bool = False
    trains_alone: bool = False
    keeps_budgets: bool = False
    may_wait: bool = False

    @abstractmethod
    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns the coefficients of the value for a problem.

        A job with `members` represents these jobs too, and its `weight` includes theirs.
        """

    def value(self, plan: Plan, problem: Problem) -> float:
        """Returns the value of a plan, lower is better."""
        held = ((node, s.duration_s * len(ids)) for s in plan.segments for node, ids in s.devices)
        return self.coefficients(problem).value(ends_of(plan, problem), held)

    def lower_bound(self, problem: Problem, bound: bounds.Bound) -> float:
        """Returns a value that no plan is below, without a solver: the sum of the least values of the three parts.

        bound: on the end of the last job.
        """
        ends, certificates = self.coefficients(problem).ends, [bounds.by_area(problem)]
        if bound.certificate is not None and bound.certificate.has_slot_prices:
            certificates.append(bound.certificate)
        least = (
            max(bounds.certified_ends_bound(certificate, problem, ends) for certificate in certificates)
            if ends
            else 0.0
        )
        return self._with_other_parts(least, problem, bound.seconds, bound.certificate)

    def best_bound(self, problem: Problem, bound: bounds.Bound) -> bounds.ValueBound:
        """Returns the best lower bound on the value, with the certificate of the part that is a sum of weight x end.

        Where no end is in that sum, the certificate is that of the part that is a maximum of factor x end.

        bound: on the end of the last job.
        """
        of = self.coefficients(problem)
        certificate = bounds.ends_certificate(problem, of.ends, bound) if of.ends else None
        if of.latest and not of.ends:
            certificate = best_latest_bound(problem, of.latest, bound).certificate
        proved = self.certified_bound(certificate, problem, bound_s=bound.seconds)
        least = self.lower_bound(problem, bound)  # a subclass may prove more in another way
        return bounds.ValueBound(proved, certificate) if proved >= least else bounds.ValueBound(least, None)

    def certified_bound(self, certificate: Certificate | None, problem: Problem, *, bound_s: float) -> float:
        """Returns the lower bound on the value that a certificate proves, together with a bound on the last end."""
        ends = self.coefficients(problem).ends
        least = bounds.certified_ends_bound(certificate, problem, ends) if ends and certificate else 0.0
        return self._with_other_parts(least, problem, bound_s, None if ends else certificate)

    def _with_other_parts(
        self, least: float, problem: Problem, bound_s: float, certificate: Certificate | None
    ) -> float:
        """Returns the bound on the sum of weight x end plus those on the other two parts of the value.

        bound_s, certificate: a bound on the last end, and prices that prove bounds on the last end of some jobs.
        """
        of = self.coefficients(problem)
        if of.latest:
            least += latest_bound(problem, of.latest, bound_s=bound_s, certificate=certificate)
        return least + (bounds.cost_bound(problem, of.prices) if of.prices else 0.0)

    def search(self, problem: Problem, limits: SearchLimits) -> Plan | None:
        """Returns a plan with its bounds by a search of the objective's own; None where it needs none."""
        return None

    def faults(self, plan: Plan, problem: Problem) -> Iterator[str]:
        """Yields what is wrong with a plan by rules that the objective adds to a problem."""
        yield from ()

    def rank(self, plan: Plan, problem: Problem) -> tuple[float, float, float]:
        """Returns a sort key, lower is better: total lateness in seconds, then the value, then the makespan."""
        return lateness_s(plan, problem), self.value(plan, problem), plan.makespan_s

    def valued(
        self, plan: Plan, problem: Problem, bound: bounds.Bound, *, best: bounds.ValueBound | None = None
    ) -> Plan:
        """Returns a plan with its value by this objective, and the lower bound of it with its certificate.

        bound: on the end of the last job.
        best: the result of `best_bound`, where it is known.
        """
        value, best = self.value(plan, problem), best or self.best_bound(problem, bound)
        least = min(best.value, value)
        return replace(plan, objective=self.name, value=value, value_bound=least, value_certificate=best.certificate)


def ends_of(plan: Plan, problem: Problem) -> dict[str, float]:
    """Returns the end of each job in seconds, including the jobs that other jobs' options train."""
    ends_s: dict[str, float] = {}
    for segment in plan.segments:
        for job in (segment.job, *problem.job(segment.job).options[segment.option].jobs):
            ends_s[job] = max(segment.end_s, ends_s.get(job, 0.0))
    return ends_s


def lateness_s(plan: Plan, problem: Problem) -> float:
    """Returns the total seconds by which jobs end after their deadlines."""
    due_s = {job.id: job.deadline_s for job in problem.jobs if job.deadline_s is not None}
    ends_s = ends_of(plan, problem) if due_s else {}
    return sum((max(0.0, ends_s[job] - deadline_s) for job, deadline_s in due_s.items()), 0.0)


class Fairness(Objective):
    """The largest finish-time fairness rho of all users (Mahajan et al., "Themis", NSDI 2020).

    rho of a user is the end of their last job, over the seconds in which their jobs could be done on 1/N of the devices
    for N users (`problem.fair_seconds`). Up to 1, no user would gain from a cluster of its own.
    """

    name = "fairness"
    trains_alone = True

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns 1 / fair seconds of the job's user, in the maximum."""
        return Coefficients(latest={job: 1.0 / fair_s for job, fair_s in problem.fair_s.items()})


class MeanCompletion(Objective):
    """The mean of the ends of all jobs; the jobs of a group count each."""

    name = "mean_completion"

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns equal shares of 1 for all jobs."""
        counts = {job.id: 1 + len(job.members) for job in problem.jobs}
        total = sum(counts.values())
        return Coefficients(ends={job: count / total for job, count in counts.items()})


class TimeToTarget(MeanCompletion):
    """The mean of the moments at which jobs reach their targets, and others end, for batches that may vary jobs."""

    name = TIME_TO_TARGET


class WeightedCompletion(Objective):
    """The sum of weight x end over all jobs."""

    name = "weighted"

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns the weight of each job."""
        return Coefficients(ends={job.id: job.weight for job in problem.jobs})


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

    def lower_bound(self, problem: Problem, bound: bounds.Bound) -> float:
        """Returns the bound on the end of the last job."""
        return bound.seconds

    def valued(
        self, plan: Plan, problem: Problem, bound: bounds.Bound, *, best: bounds.ValueBound | None = None
    ) -> Plan:
        """Returns the plan as it is."""
        return plan


MAKESPAN = Makespan()


OBJECTIVES = Registry(
    kind="objective",
    entry_point_group="ringmaster.objectives",
    builtin={
        each.name: f"{__name__}:{each.__name__}"
        for each in (Makespan, WeightedCompletion, MeanCompletion, Fairness, TimeToTarget)
    }
    | features.dotted_names("OBJECTIVES"),
)


def objective_names() -> tuple[str, ...]:
    """Returns the names of all objectives, built-in ones first."""
    return tuple(OBJECTIVES.paths())


@cache
def objective_by_name(name: str) -> Objective:
    """Returns the objective `name`. Built-in objectives cannot be replaced.

    Raises ValueError on an unknown name, with the known ones, and where an entry point leads to no such objective.
    """
    objective: Objective = OBJECTIVES.load(name, Objective)()
    return objective


HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class PlanningTerms:
    """The objective of plans and the constraints that they must meet.

    objective: the name of the objective, as in `solve`.
    deadlines_s: by job, in seconds from the start of the batch.
    weights: by job; 1 for jobs that are not named.
    users: by job, whose job it is; each job that is not named has a user of its own.
    price_per_device_hour: price of any device, in any currency; at 1, a cost is in device-hours.
    features: what optional features add.
    second: where something depends on the time, the objective by which jobs that are `patient` are planned in what the
        others leave (`two_objectives`); empty for none.
    """

    objective: str = "makespan"
    deadlines_s: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    price_per_device_hour: float = 1.0
    features: tuple[TermsFeature, ...] = stored_features(terms_feature)
    second: str = field(default="", metadata=SINCE_LATER)
    patient: tuple[str, ...] = field(default=(), metadata=SINCE_LATER)

    def on(
        self,
        problem: Problem,
        *,
        elapsed_s: float = 0.0,
        wall_clock: Callable[[], float] = time.time,
        past: PastUse = lambda: (),
    ) -> Problem:
        """Returns the problem under these terms, with its time 0 `elapsed_s` seconds after the start of the batch.

        wall_clock: says when time 0 is, in seconds since the epoch.
        past: what the jobs have held until then.

        Nodes without a series of prices get the price where the objective depends on prices. A deadline that has passed
        becomes one of 0 s, which no plan meets. A job that represents several has the earliest of their deadlines and
        the sum of their weights.
        """
        jobs = tuple(
            replace(
                job,
                deadline_s=self._due_s((job.id, *job.members), elapsed_s=elapsed_s),
                weight=sum(self.weights.get(name, 1.0) for name in (job.id, *job.members)),
                user=self.users.get(job.id, ""),
            )
            for job in problem.jobs
        )
        is_paid = bool(objective_by_name(self.objective).coefficients(problem).prices)
        nodes = tuple(
            replace(node, price=self.price_per_device_hour / HOUR_S if is_paid and not node.price_steps else node.price)
            for node in problem.nodes
        )
        problem = replace(problem, jobs=jobs, nodes=nodes)
        for feature in self.features:
            problem = feature.on(problem, now_s=wall_clock(), past=past)
        if self.second and problem.has_series:
            patient = set(self.patient)
            kept = (replace(job, weight=0.0) if job.id in patient else job for job in problem.jobs)
            problem = replace(problem, jobs=tuple(kept))
        return problem

    def _due_s(self, jobs: Sequence[str], *, elapsed_s: float) -> float | None:
        due_s = [self.deadlines_s[name] for name in jobs if name in self.deadlines_s]
        return max(0.0, min(due_s) - elapsed_s) if due_s else None


def plan_giving_up_bounds(problem: Problem, make_plan: Callable[[Problem], Plan]) -> tuple[Plan, tuple[str, ...]]:
    """Returns a plan, and the jobs whose deadlines were dropped, where budgets are given up before any deadline.

    Where even then there is no plan, nodes are planned as if they did not go away: jobs stop at checkpoints there.
    """
    if problem.budgets:
        with suppress(ProblemError):
            return make_plan(problem), ()
    free = replace(problem, budgets={})
    try:
        return plan_giving_up_deadlines(free, make_plan)
    except ProblemError:
        if all(node.available_until_s is None for node in problem.nodes):
            raise
    staying = tuple(replace(node, available_until_s=None) for node in problem.nodes)
    return plan_giving_up_deadlines(replace(free, nodes=staying), make_plan)


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
