"""Divisions of the jobs into fused groups, and estimates of their objective before they are planned.

Similar jobs make similar groups, and the planner cannot distinguish divisions into similar groups, so each class of
such divisions is estimated once. An estimate uses the division's lower bound and simple list schedules, which takes
milliseconds. The best divisions are planned, each group as one job of an ordinary problem (`Contraction`); the bound is
that of the fused problem, so that the gap includes what the choice of division may have lost.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ringmaster.errors import NoRoomError, ProblemError
from ringmaster.tasks.planning.bounds.bounds import Bound, by_area, conflicts, preemptive_bound, rigid_bound
from ringmaster.tasks.planning.objectives import Objective
from ringmaster.tasks.planning.plan_search import WORTH_S
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, schedule
from ringmaster.tasks.planning.plans.plan import Certificate, Plan, Segment
from ringmaster.tasks.planning.problems.problem import Problem, likeness
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun, Option, PlanningJob, cycle_in
from ringmaster.tasks.planning.work import WorkBudget

Group = frozenset[str]  # ids of the jobs that an option trains together
OptionIndex = tuple[int, int]  # index of a job, index of its option


@dataclass(frozen=True)
class Contracted:
    """A problem with one job per group; places[job id][k] is the (job, option) that the job's option k represents."""

    problem: Problem
    places: dict[str, tuple[OptionIndex, ...]]

    def expanded(self, plan: Plan, problem: Problem) -> tuple[Segment, ...]:
        """Returns a plan's segments as segments of the fused problem."""
        segments = []
        for segment in plan.segments:
            j, k = self.places[segment.job][segment.option]
            segments.append(replace(segment, job=problem.jobs[j].id, option=k))
        return tuple(segments)


class Contraction:
    """Contracts one problem by many divisions.

    groups: the groups that options train together, in the order of the problem.
    ones: each group, also one of a single job, as one job. It waits for jobs of the problem, not for groups of them.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._places: dict[Group, list[OptionIndex]] = {}
        for j, job in enumerate(problem.jobs):
            for k, option in enumerate(job.options):
                self._places.setdefault(frozenset((job.id, *option.jobs)), []).append((j, k))
        self.groups = tuple(group for group in self._places if len(group) > 1)
        self._index = {job.id: j for j, job in enumerate(problem.jobs)}
        self._waited_for = {other for job in problem.jobs for other in job.after}
        self.ones = {group: self._as_one(group) for group in self._places}

    def of(self, groups: Iterable[Group]) -> Contracted | None:
        """Returns the problem with each group as one job, or None where groups would wait for each other in a cycle.

        The job has the name of the first job that owns options of the group.

        Where groups of jobs are limited, such as those of a user, jobs of different ones are not trained together.
        """
        if self.problem.limits and any(len({self.problem.job(name).user for name in group}) > 1 for group in groups):
            return None
        ones = {group: self.ones[group] for group in sorted(groups, key=lambda group: self._places[group][0])}
        name_of = {name: one.id for group, one in ones.items() for name in group}
        jobs = tuple(
            replace(one, after=tuple(dict.fromkeys(name_of[other] for other in one.after))) if one.after else one
            for one in ones.values()
        )
        if cycle_in({job.id: job.after for job in jobs}):
            return None
        return Contracted(
            replace(self.problem, jobs=jobs),
            {one.id: tuple(self._places[group]) for group, one in ones.items()},
        )

    def likeness(self, group: Group) -> Hashable:
        """Returns a key that is equal for groups that the planner cannot distinguish."""
        one = self.ones[group]
        is_special = one.after or one.running is not None or not self._waited_for.isdisjoint(group)
        return group if is_special else likeness(one)

    def _as_one(self, group: Group) -> PlanningJob:
        """Returns a group as one job.

        Its release is the latest and its deadline the earliest of its members, and its weight is their sum. It
        belongs to the user of the first of them.
        """
        jobs, places = self.problem.jobs, self._places[group]
        lead = jobs[places[0][0]]
        members = [jobs[j] for j in sorted(self._index[name] for name in group)]
        due = [job.deadline_s for job in members if job.deadline_s is not None]
        running: CurrentRun | None = None
        for new, (j, k) in enumerate(places):
            old = jobs[j].running
            if old is not None and old.option == k:
                running = replace(old, option=new)
        others = (name for job in members for name in (job.id, *job.members) if name != lead.id)
        return PlanningJob(
            id=lead.id,
            options=tuple(replace(jobs[j].options[k], jobs=()) for j, k in places),
            after=tuple(dict.fromkeys(other for job in members for other in job.after if other not in group)),
            release_s=max(job.release_s for job in members),
            deadline_s=min(due, default=None),
            weight=sum(job.weight for job in members),
            user=lead.user,
            running=running,
            started=any(job.started for job in members),
            members=tuple(others),
        )


MAX_JUDGED, JOBS_JUDGED = 150, 6_000  # limits of the local search: divisions estimated, and jobs in all of them
MAX_LENGTHS = 16  # limit of the group lengths for which divisions are made
PER_JOB_S = 5e-5  # work of an estimate, per job
SAME = 1e-4  # relative difference of values that count as equal

Division = frozenset[Group]


@dataclass(frozen=True, eq=False)
class DivisionEstimate:
    """Estimate of a division's objective, made without planning it.

    listed: the best plan of simple rules; None where there is none.
    late_s, list_value: lateness and objective of that plan.
    promise: lower bound on the objective.
    value: estimate of the objective that planning will reach.
    num_fused: number of jobs in groups of several.
    """

    contracted: Contracted
    listed: Plan | None
    late_s: float
    list_value: float
    promise: float
    value: float
    num_fused: int

    def is_better(self, other: "DivisionEstimate") -> bool:
        """Whether the division is better than another one.

        The lateness is compared first, then the value. Where both are equal within `SAME`, the division with fewer
        fused jobs is better, then the one with the lower `promise`.
        """
        if abs(self.late_s - other.late_s) > SAME * other.value:
            return self.late_s < other.late_s
        if abs(self.value - other.value) > SAME * other.value:
            return self.value < other.value
        return (self.num_fused, self.promise) < (other.num_fused, other.promise * (1 - SAME))


class Divisions:
    """The divisions of a problem that have been estimated.

    is_preemptive: plans may switch.
    work: limits the search.
    """

    def __init__(self, problem: Problem, *, objective: Objective, is_preemptive: bool, work: WorkBudget) -> None:
        self.problem, self.objective, self.is_preemptive, self.work = problem, objective, is_preemptive, work
        self._contraction = Contraction(problem)
        self._likenesses: dict[Group, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._estimates: dict[Hashable, DivisionEstimate | None] = {}
        self.alone = self.division([])
        # Groups that may be formed and can meet their deadline, small ones first.
        may_form = () if objective.trains_alone else self._contraction.groups
        self._groups = sorted((g for g in may_form if self._area(g) < float("inf")), key=len)

    def search(self) -> tuple[list[DivisionEstimate], list[DivisionEstimate]]:
        """Estimates divisions and returns all of them, once by estimated value and once by lower bound, best first.

        The divisions are made for groups of several lengths, and by local search near the best of these.
        """
        starts = [*self._by_length(), self.alone]
        estimated = [(start, estimate) for start in starts if (estimate := self.estimate(start)) is not None]
        if estimated:
            best = estimated[0]
            for trial in estimated[1:]:
                best = trial if trial[1].is_better(best[1]) else best
            self._climb(*best)
        known = [estimate for estimate in self._estimates.values() if estimate is not None]
        by_value = sorted(known, key=lambda o: (o.late_s > SAME * o.value, o.value, o.num_fused, o.promise))
        return by_value, sorted(known, key=lambda o: (o.promise, o.num_fused, o.value))

    def division(self, groups: Iterable[Group]) -> Division:
        """Returns the division with the groups, the group of every pinned job in any case, and all other jobs alone."""
        pinned = [
            frozenset((job.id, *job.options[job.running.option].jobs))
            for job in self.problem.jobs
            if job.running is not None and job.running.pinned_until_s > 0
        ]
        formed: list[Group] = []
        for group in (*pinned, *groups):
            if not any(group & other for other in formed):
                formed.append(group)
        grouped: frozenset[str] = frozenset().union(*formed)
        return frozenset((*formed, *(frozenset((job.id,)) for job in self.problem.jobs if job.id not in grouped)))

    def estimate(self, division: Division) -> DivisionEstimate | None:
        """Estimates a division; returns None where its groups would wait for each other."""
        signature = tuple(sorted(map(self._likeness, division)))
        if signature not in self._estimates:
            contracted = self._contraction.of(division)
            self._estimates[signature] = None if contracted is None else self._judge(contracted, division)
        return self._estimates[signature]

    def _likeness(self, group: Group) -> int:
        """Returns a number that identifies the class of similar groups."""
        if group not in self._likenesses:
            likeness = self._contraction.likeness(group)
            self._likenesses[group] = self._numbers.setdefault(likeness, len(self._numbers))
        return self._likenesses[group]

    def _judge(self, contracted: Contracted, division: Division) -> DivisionEstimate:
        problem = contracted.problem
        self.work.charge(PER_JOB_S * len(problem.jobs))
        bound = preemptive_bound(problem)
        promise = self.objective.lower_bound(problem, bound)
        listed, (late_s, list_value, _) = None, (float("inf"),) * 3
        for plan in simple_lists(problem, bound, self.objective):
            rank = self.objective.rank(plan, problem)
            if listed is None or rank[:2] < (late_s, list_value):
                listed, (late_s, list_value, _) = plan, rank
        num_fused = sum(len(group) for group in division if len(group) > 1)
        estimate = DivisionEstimate(contracted, listed, late_s, list_value, promise, list_value, num_fused)
        of = self.objective.coefficients(problem)
        if not (of.latest or of.ends):  # plans come close to the bound: each job under its cheapest option
            return replace(estimate, value=promise)
        if self.objective.only_last_end and self.is_preemptive and list_value - promise > WORTH_S:
            return replace(estimate, value=min(list_value, promise + problem.switch_cost_s))
        return estimate

    def _by_length(self) -> Iterator[Division]:
        """Yields divisions for some lengths, longest first: groups that take no longer and few device-seconds."""
        lengths = sorted({o.whole_s for g in self._groups for o in self._contraction.ones[g].options}, reverse=True)
        step = max(1.0, len(lengths) / MAX_LENGTHS)
        for i in range(min(len(lengths), MAX_LENGTHS)):
            names = [job.id for job in self.problem.jobs]
            yield self.division(self._covering(names, within_s=lengths[int(i * step)]))

    def _covering(
        self, names: Collection[str], *, within_s: float = float("inf"), but: Group = frozenset()
    ) -> set[Group]:
        """Returns disjoint groups of these jobs that take few device-seconds.

        From small to large, each group replaces those that it overlaps where that saves device-seconds.

        but: a group that is not to be formed.
        """
        group_of = {name: frozenset((name,)) for name in names}
        for group in self._groups:
            if group == but or not group_of.keys() >= group:
                continue
            now = {group_of[name] for name in group}
            left = frozenset().union(*now) - group
            before = sum(self._area(other, within_s) for other in now)
            after = self._area(group, within_s) + sum(self._area(frozenset((name,)), within_s) for name in left)
            if after < before:
                group_of |= {name: frozenset((name,)) for name in left} | dict.fromkeys(group, group)
        return set(group_of.values())

    def _area(self, group: Group, within_s: float = float("inf")) -> float:
        """Returns the fewest device-seconds of a group; infinite where it takes longer than it may."""
        one = self._contraction.ones[group]
        due_s = float("inf") if one.deadline_s is None else one.deadline_s - one.release_s
        by_s = float("inf") if len(group) == 1 else min(within_s, due_s) * (1 + 1e-9)
        return min((o.num_devices * o.whole_s for o in one.options if o.whole_s <= by_s), default=float("inf"))

    def _climb(self, now: Division, estimate: DivisionEstimate) -> None:
        """Forms or breaks up groups and regroups the jobs that this affects, as long as the estimate improves."""
        left, is_better = min(MAX_JUDGED, JOBS_JUDGED // len(self.problem.jobs)), True
        while is_better:
            is_better = False
            for group in self._groups:
                for trial in self._moves(now, group):
                    num_known = len(self._estimates)
                    trial_estimate = self.estimate(trial)
                    left -= len(self._estimates) - num_known
                    if left <= 0 or self.work.is_over():
                        return
                    if trial_estimate is not None and trial_estimate.is_better(estimate):
                        now, estimate, is_better = trial, trial_estimate, True
                        break

    def _moves(self, now: Division, group: Group) -> Iterator[Division]:
        """Yields divisions with the group formed, or broken up if it exists.

        The other jobs of the affected groups are first alone, then regrouped.
        """
        touched = [other for other in now if other & group]
        names = frozenset().union(*touched)
        others = [other for other in now if len(other) > 1 and not other & group]
        formed = [] if group in now else [group]
        yield self.division([*others, *formed])
        rest = self._covering(names.difference(*formed), but=group)
        yield self.division([*others, *formed, *(other for other in rest if len(other) > 1)])


def simple_lists(problem: Problem, bound: Bound, objective: Objective) -> Iterator[Plan]:
    """Yields plans by simple rules, and list schedules of the options that are cheapest at the bound's prices."""
    for baseline in BASELINES:
        try:
            yield baseline(problem)
        except NoRoomError:
            continue
    certificate = bound.certificate or by_area(problem)
    chosen = {job.id: _cheapest(job, certificate, problem.device_types) for job in problem.jobs}

    def runtime_s(job: PlanningJob) -> float:
        return job.options[chosen[job.id]].whole_s

    def when_due(job: PlanningJob) -> tuple[float, float]:
        return (float("inf") if job.deadline_s is None else job.deadline_s, -runtime_s(job))

    of, orders = objective.coefficients(problem), [sorted(problem.jobs, key=when_due)]
    if of.ends:
        orders.append(sorted(problem.jobs, key=lambda job: runtime_s(job) / max(of.ends.get(job.id, 0.0), 1e-9)))
    for order in orders:
        try:
            segments = schedule(problem, [(job.id, chosen[job.id]) for job in order], prices=of.prices)
            yield Plan(problem.name, segments, method="list by the bound's prices")
        except NoRoomError:
            continue


def _cheapest(job: PlanningJob, certificate: Certificate, kinds: Sequence[str]) -> int:
    """Returns the index of the option with the cheapest seconds at the prices; of equal ones, the shortest.

    kinds: the device types of the nodes.
    """
    own = certificate.job_prices.get(job.id, 0.0)

    def cost(option: Option) -> tuple[float, float]:
        types = (option.device_type,) if option.device_type else kinds
        price = min(certificate.prices_of(kind).get(option.slot, 0.0) for kind in types)
        return (option.num_nodes * price + own) * option.whole_s, option.whole_s

    return min(range(len(job.options)), key=lambda k: cost(job.options[k]))


EFFORT, DEAR, CHEAP = 12, 4, 1  # limit in total; effort of a division that takes seconds to plan, and of another one
GAIN = 1e-3  # minimum possible gain of a division that is planned, as a share of the best plan
MIN_GAIN = 1e-3  # minimum gain of fusing, as a share of the objective; below it, jobs stay alone
ENOUGH_TO_TELL = 5e-3  # `enough` of the plan with every job alone, where it only serves to report the saving
SHARE_OF_FIRST, SHARE_OF_ALONE = 0.4, 0.5  # of the work that is left


class FusedSearch:
    """Plans divisions in the order of their estimates.

    alone: the plan of the problem without fused options, every job alone; None where it was not planned or no plan was
        found.
    """

    def __init__(
        self, problem: Problem, solve: Callable[..., Plan], *, work: WorkBudget, preemption: str, objective: Objective
    ) -> None:
        self.problem, self.solve, self.preemption, self.objective = problem, solve, preemption, objective
        self.work = work
        self.best: Plan | None = None
        self.best_value, self.took_s = float("inf"), 0.0
        self.alone: Plan | None = None
        self.faults: tuple[str, ...] = ()
        self._tried: list[DivisionEstimate] = []
        self._divisions = Divisions(problem, objective=objective, is_preemptive=preemption != "never", work=work)

    def run(self, *, with_alone: bool = False) -> None:
        """Searches for the best plan.

        with_alone: also plan the division with every job alone, even if it cannot be the best.
        """
        began = time.monotonic()
        self.bound = preemptive_bound(self.problem)
        by_value, by_promise = self._divisions.search()
        self.seconds = {"division": round(time.monotonic() - began, 3)}
        alone = self._divisions.estimate(self._divisions.alone)
        assert alone is not None, "single jobs wait for each other as in the problem"
        self._plan_best_of(by_value[:1], share=SHARE_OF_FIRST)
        if with_alone:
            is_beaten = self.best_value < alone.promise * (1 - MIN_GAIN)
            self._plan(alone, share=SHARE_OF_ALONE, enough=ENOUGH_TO_TELL if is_beaten else 0.0)
        self._plan_best_of([estimate for pair in zip(by_value, by_promise, strict=True) for estimate in pair])
        self._plan_best_of([alone])  # never worse than without fusing

    def proved(self) -> Plan:
        """Returns the best plan with the bound of the fused problem. Raises ProblemError if no plan was found."""
        if self.best is None:
            raise ProblemError([*conflicts(self.problem)] or self.faults)
        plan = replace(
            self.best,
            lower_bound_s=min(self.bound.seconds, self.best.makespan_s),
            certificate=self.bound.certificate,
            proof=self.bound.proof,
            solver_bound_s=None,  # of one division
            solver="",
            seconds={**self.seconds, **self.best.seconds},
        )
        if self.preemption == "never":
            limits = {"work_s": min(5.0, self.work.left_s), "time_limit_s": self.work.time_left_s}
            rigid_s, _ = rigid_bound(self.problem, **limits)
            if rigid_s > self.bound.seconds:
                plan = replace(plan, solver_bound_s=min(rigid_s, plan.makespan_s), solver="pattern MILP")
        return self.objective.valued(plan, self.problem, self.bound)

    def _plan_best_of(self, looks: list[DivisionEstimate], *, share: float = 1.0) -> None:
        """Plans divisions in the given order as long as the next one could be better.

        share: of the work that is left, for each division.
        """
        effort = 0
        for estimate in looks:
            if estimate in self._tried or estimate.promise >= self.best_value * (1 - GAIN):
                continue
            effort += DEAR if estimate.list_value - estimate.promise > WORTH_S else CHEAP
            if effort > EFFORT or (self.best and self.work.left_s < self.took_s):
                return
            self._plan(estimate, share=share)

    def _plan(self, estimate: DivisionEstimate, *, share: float = 1.0, enough: float = 0.0) -> None:
        if estimate in self._tried:
            return
        self._tried.append(estimate)
        problem = estimate.contracted.problem
        try:
            with self.work.part(share) as work:
                plan = self.solve(problem, work=work, enough=enough)
        except (ProblemError, NoRoomError) as error:
            self.faults = getattr(error, "faults", (str(error),))
            return
        finally:
            self.took_s = max(self.took_s, work.spent_s)
        is_listed_better = self.objective.value(plan, problem) > estimate.list_value
        if is_listed_better and estimate.listed and estimate.late_s <= 0:
            plan = _proving(plan, estimate.listed, value=estimate.list_value)
        if not estimate.num_fused:
            self.alone = plan
        if self.objective.value(plan, problem) < self.best_value:
            self._take(estimate, plan)

    def _take(self, estimate: DivisionEstimate, plan: Plan) -> None:
        """Stores a plan of a division as the best one."""
        num_groups = sum(bool(job.members) for job in estimate.contracted.problem.jobs)
        method = f"{plan.method}, {num_groups} fused groups" if num_groups else plan.method
        segments = estimate.contracted.expanded(plan, self.problem)
        self.best = replace(plan, segments=segments, method=method)
        self.best_value = self.objective.value(self.best, self.problem)


def _proving(proved: Plan, better: Plan, *, value: float) -> Plan:
    """Returns the better plan, which has that value, with the bounds and proofs of the plan that was found."""
    lower_s = None if proved.lower_bound_s is None else min(proved.lower_bound_s, better.makespan_s)
    solver_s = None if proved.solver_bound_s is None else min(proved.solver_bound_s, better.makespan_s)
    plan = replace(proved, segments=better.segments, method=better.method, lower_bound_s=lower_s)
    plan = replace(plan, solver_bound_s=solver_s)
    if plan.value is None:
        return plan
    return replace(plan, value=value, value_bound=None if plan.value_bound is None else min(plan.value_bound, value))
