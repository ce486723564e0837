"""What a change of the problem gains in makespan: an interval that is proved for its runtimes before planning again.

Let the plan end at UB, and let no plan end before LB. Let no plan of the changed problem end before LB', and let some
plan of it end at UB'. Then the difference between the best plans of the two problems is in

    [ max(0, LB - UB'),  UB - LB' ]

LB' is the larger of what the plan's own prices prove for the changed problem, which takes milliseconds, and of the
bound of a linear program that is solved again. UB' is the end of a `quick_plan`, and later that of a plan that was
searched for. What a new plan gains over the old one, UB - UB', is in the interval, too.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import ClassVar

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.bounds.bounds import Bound, certified_bound, pattern_bound, preemptive_bound
from ringmaster.tasks.planning.bounds.job_costs import folded, is_foldable, only
from ringmaster.tasks.planning.durations import counted
from ringmaster.tasks.planning.fusion import choose_groups, contracted, groups_of
from ringmaster.tasks.planning.objectives import MAKESPAN, ends_of, without_deadlines
from ringmaster.tasks.planning.plan_search import WORTH_S
from ringmaster.tasks.planning.plans.plan import Certificate, Plan, Segment
from ringmaster.tasks.planning.plans.verify import verify
from ringmaster.tasks.planning.problem_changes import ProblemChange, more
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningNode
from ringmaster.tasks.planning.work import WORK_S, WorkBudget


@dataclass(frozen=True, kw_only=True)
class MoreDevices(ProblemChange):
    """A node has `num_devices` more. device_type: of that node; "" where all nodes have the same type."""

    option = "add_devices"

    num_devices: int
    device_type: str = ""

    def on(self, problem: Problem, *, node: str = "") -> Problem:
        """Returns the problem with the grown node."""
        kind = type_of(problem, self.device_type)
        grown = node or next(each.id for each in problem.nodes if each.device_type == kind)
        nodes = tuple(
            replace(each, num_devices=each.num_devices + self.num_devices) if each.id == grown else each
            for each in problem.nodes
        )
        return replace(problem, nodes=nodes)

    def in_words(self, *, node: str = "", device: str = "") -> str:
        """Returns how many devices are added to which node."""
        place = f" on {node}" if node else ""
        return f"{more(self.num_devices, 'device')}{type_text(self.device_type, device)}{place}"


@dataclass(frozen=True, kw_only=True)
class MoreNodes(ProblemChange):
    """There are `num_nodes` more nodes of `num_devices` devices each."""

    option = "add_node"

    num_devices: int
    device_type: str = ""
    num_nodes: int = 1

    def on(self, problem: Problem, *, node: str = "") -> Problem:
        """Returns the problem with nodes like those of their type and size, if there are any, and without an end."""
        kind = type_of(problem, self.device_type)
        alike = [each for each in problem.nodes if (each.device_type, each.num_devices) == (kind, self.num_devices)]
        model = replace(alike[0], available_until_s=None) if alike else PlanningNode("", self.num_devices, kind)
        taken = {each.id for each in problem.nodes}
        names = (name for number in count(1) if (name := f"new{number}") not in taken)
        added = (replace(model, id=name) for name in islice(names, self.num_nodes))
        return replace(problem, nodes=(*problem.nodes, *added))

    def in_words(self, *, node: str = "", device: str = "") -> str:
        """Returns how many nodes of which size are added."""
        size = f"{counted(self.num_devices, 'device')}{type_text(self.device_type, device)}"
        return f"{more(self.num_nodes, 'node')} of {size}"


@dataclass(frozen=True, kw_only=True)
class FewerJobs(ProblemChange):
    """The jobs are left out. Jobs that wait for them must be left out, too."""

    option = "without"

    jobs: tuple[str, ...]

    def on(self, problem: Problem, *, node: str = "") -> Problem:
        """Returns the problem of the other jobs."""
        known = [job.id for job in problem.jobs]
        if wrong := [name for name in self.jobs if name not in known]:
            some = ", ".join(known[:20]) + (" and others" if len(known) > 20 else "")
            raise ProblemError([f"there is no job {name!r}. To fix: name some of {some}" for name in wrong])
        if waiting := dependents(problem, self.jobs):
            every = ",".join([*self.jobs, *waiting])
            raise ProblemError(
                [f"{', '.join(waiting)} would wait for what is left out. To fix: leave all out, with --without {every}"]
            )
        left = [name for name in known if name not in self.jobs]
        if not left:
            raise ProblemError(["without these no job is left. To fix: leave out fewer"])
        return only(problem, left)

    def in_words(self, *, node: str = "", device: str = "") -> str:
        """Returns which jobs are left out."""
        return f"{', '.join(self.jobs)} left out"


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """All jobs are to end within `due_s` seconds from the start of the plan."""

    option: ClassVar[str] = "deadline"

    due_s: float


def type_text(device_type: str, device: str = "") -> str:
    """Returns the type of devices, or else their kind, for the end of a phrase."""
    return f" of type {device_type}" if device_type else device and f" ({device})"


def type_of(problem: Problem, device_type: str) -> str:
    """Returns the type of added devices. Raises ProblemError where it is unknown, or where it is not said which."""
    kinds = problem.device_types
    if device_type in kinds:
        return device_type
    if not device_type and len(kinds) == 1:
        return kinds[0]
    what = f"no node has devices of type {device_type!r}" if device_type else "the nodes have several types of devices"
    remedy = f"name one of {', '.join(map(repr, kinds))}" if any(kinds) else "leave the type out: no node has one"
    raise ProblemError([f"{what}. To fix: {remedy}"])


def dependents(problem: Problem, names: Collection[str]) -> tuple[str, ...]:
    """Returns the jobs that wait for any of these, directly or through others, in the order of the problem."""
    dependent_names = set(names)
    for job in problem.in_order:
        if dependent_names & set(job.after):
            dependent_names.add(job.id)
    return tuple(job.id for job in problem.jobs if job.id in dependent_names and job.id not in names)


QUICK_WORK_S = 0.03  # of annealing between groups
EFFORT = 0.01  # of the last local search
METHOD = "quick plan"


def quick_plan(problem: Problem, *, bound: Bound, start: Plan, before: Problem) -> Plan | None:
    """Returns the best plan that takes no search worth mentioning, checked by the verifier; None where there is none.

    bound: the problem's own; without its prices, nothing is planned.
    start: a plan of the problem as it was before; the new plan has its groups of jobs.

    Where `start`, without jobs that are gone, could be improved by a few seconds at most, it is the plan: compiled code
    would take longer to load than it could gain.
    """
    plans = list(_valid([_kept(start, problem, before)], problem))
    best_s = min((plan.makespan_s for plan in plans), default=start.makespan_s)
    if bound.certificate is not None and best_s - bound.seconds > WORTH_S:
        plans += _valid([_planned(problem, bound, start, before, due_s=best_s)], problem)
    return min(plans, key=lambda plan: plan.makespan_s, default=None)


def _kept(start: Plan, problem: Problem, before: Problem) -> Sequence[Segment]:
    """Returns the segments of the jobs that are still there; none where options were moved between jobs."""
    if any(before.job(job.id).options != job.options for job in problem.jobs):
        return ()
    left = {job.id for job in problem.jobs}
    return tuple(segment for segment in start.segments if segment.job in left)


def _planned(problem: Problem, bound: Bound, start: Plan, before: Problem, *, due_s: float) -> Sequence[Segment]:
    """Returns the segments of a preemptive plan that is hardly polished; none where its rules are not modelled."""
    from ringmaster.tasks.planning.plans.retiming import retimed
    from ringmaster.tasks.planning.preemptive import plan_preemptive

    if problem.is_fused:
        return _planned_groups(problem, start, before, due_s=due_s)
    # No plan worth having ends after `start`, so deadlines after it are none.
    slack = tuple(job.id for job in problem.jobs if job.deadline_s is not None and job.deadline_s >= due_s)
    undated = without_deadlines(problem, slack) if slack else problem
    if not is_foldable(undated) or not 0 < bound.seconds < float("inf"):
        return ()
    alike = folded(undated)
    segments = plan_preemptive(alike, bound, work=WorkBudget(QUICK_WORK_S), effort=EFFORT)
    if segments and alike is not undated:
        segments = retimed(undated, segments, objective=MAKESPAN)
    return segments or ()


def _planned_groups(problem: Problem, start: Plan, before: Problem, *, due_s: float) -> Sequence[Segment]:
    """Returns the segments of a plan with the groups of `start`, less the jobs that are gone."""
    left = {job.id for job in problem.jobs}
    groups = {}
    try:
        for lead, members in groups_of(start, before).items():
            names = [name for name in (lead, *members) if name in left]
            if len(names) > 1:
                groups[names[0]] = tuple(names[1:])
        whole = contracted(problem, groups)
    except ValueError:  # the groups changed during the plan, or no option trains the rest of one
        return ()
    own = preemptive_bound(whole.problem)
    segments = _planned(whole.problem, own, start, before, due_s=due_s)
    return whole.expanded(Plan(problem.name, tuple(segments)), problem) if segments else ()


def _valid(rows: Sequence[Sequence[Segment]], problem: Problem) -> Iterator[Plan]:
    for segments in rows:
        plan = Plan(problem.name, tuple(segments), method=METHOD)
        if segments and not verify(plan, problem):
            yield plan


@dataclass(frozen=True, kw_only=True)
class UserEnd:
    """The end of the last job of a user: by the plan, by a bound under the change, and by the plan under the change."""

    user: str
    before_s: float
    bound_s: float
    planned_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The answer about a change, in seconds.

    on: the node that gets the devices, if a node grows.
    least_s, most_s: the interval, proved for the runtimes of the problem.
    most_by_prices_s: its upper end by the plan's own prices alone.
    bound_s: no plan of the changed problem ends before.
    makespan_s: the end of the best known plan of it; None where no plan is known.
    planned_s: what a plan that was searched for gains over the old one; None before.
    users: of a change between users, when the jobs of each end (`ProblemChange.users`).
    """

    change: ProblemChange
    on: str = ""
    least_s: float
    most_s: float
    most_by_prices_s: float
    bound_s: float
    makespan_s: float | None
    planned_s: float | None = None
    users: tuple[UserEnd, ...] = ()


class WhatIf:
    """Answers questions about a problem and a plan of it.

    Raises ProblemError where the plan is not one of the problem, or minimises something else than the makespan.

    bound_s: no plan of the problem ends before.
    certificate: prices of slots and jobs that prove this, or nearly this, where the proof is by prices of whole jobs.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        if plan.objective != MAKESPAN.name:
            raise ProblemError(
                [f"the plan minimises {plan.objective}, and what a change gains is known for the makespan alone. "
                 "To fix: plan with --objective makespan"]
            )  # fmt: skip
        # Without prices, the bound is computed again, and what the plan claims is not used.
        if faults := verify(plan if plan.certificate else replace(plan, lower_bound_s=None), problem):
            raise ProblemError(faults)
        self.problem, self.plan = problem, plan
        self._proof, self.bound_s = _proof(plan, problem)
        self.certificate = self._proof
        if self._proof.work_prices:  # they contain no price of a device, and cannot be checked on many devices
            self.certificate = pattern_bound(problem).certificate or Certificate()

    @property
    def makespan_s(self) -> float:
        """The end of the plan."""
        return self.plan.makespan_s

    def bound_by_prices_s(self, problem: Problem) -> float:
        """Returns what the plan's own prices prove about a changed problem: any prices prove a bound."""
        left = {job.id for job in problem.jobs}
        bound_s = certified_bound(self.certificate.only(left), problem)
        if self._proof is not self.certificate:
            with suppress(ValueError):  # prices of whole jobs cannot be checked on many devices
                bound_s = max(bound_s, certified_bound(self._proof.only(left), problem))
        return bound_s

    def grown_node(self, change: MoreDevices) -> str:
        """Returns the node on which more devices gain most by the plan's prices; the first one if several do."""
        kind = type_of(self.problem, change.device_type)
        every = {replace(node, id=""): node.id for node in self.problem.nodes[::-1] if node.device_type == kind}

        def rounded_bound_s(node: str) -> float:
            return float(f"{self.bound_by_prices_s(change.on(self.problem, node=node)):.9g}")

        return min((node.id for node in self.problem.nodes if node.id in every.values()), key=rounded_bound_s)

    def gain(self, change: ProblemChange, *, solves_bound: bool = True) -> Gain:
        """Returns the proved interval of what a change gains, without a search.

        Raises ProblemError as `ProblemChange.on`.

        solves_bound: whether to solve the linear program of the bound again, which takes most of the time; else the
            plan's own prices are the bound.
        """
        on = self.grown_node(change) if isinstance(change, MoreDevices) else ""
        problem = change.on(self.problem, node=on)
        by_prices_s = self.bound_by_prices_s(problem)
        bound = preemptive_bound(problem) if solves_bound else Bound(by_prices_s, None, "prices of another plan")
        bound_s = max(by_prices_s, bound.seconds)
        plan = quick_plan(problem, bound=bound, start=self.plan, before=self.problem)
        gain = self._gain(
            change,
            on=on,
            by_prices_s=by_prices_s,
            bound_s=bound_s,
            makespan_s=None if plan is None else plan.makespan_s,
        )
        of_users = change.users(problem)
        ends_s = last_ends_s(self.plan, self.problem) if of_users else {}
        jobs = {user: [job.id for job in problem.jobs if job.user == user] for user in of_users if user in ends_s}
        users = tuple(
            UserEnd(user=user, before_s=ends_s[user], bound_s=preemptive_bound(only(problem, own)).seconds)
            for user, own in jobs.items()
        )
        return replace(gain, users=users)

    def planned(self, gain: Gain, *, work_s: float = WORK_S, time_limit_s: float = 300.0, seed: int = 0) -> Gain:
        """Returns the gain after the changed problem was planned again; the interval is narrower then.

        Raises ProblemError where no plan of the changed problem meets its deadlines.
        """
        problem = gain.change.on(self.problem, node=gain.on)
        plan = choose_groups(problem, work_s=work_s, time_limit_s=time_limit_s, seed=seed).fused_plan
        makespan_s = plan.makespan_s if gain.makespan_s is None else min(plan.makespan_s, gain.makespan_s)
        bound_s = max(gain.bound_s, _proof(plan, problem)[1])
        by_prices_s = self.makespan_s - gain.most_by_prices_s
        answer = self._gain(gain.change, on=gain.on, by_prices_s=by_prices_s, bound_s=bound_s, makespan_s=makespan_s)
        ends_s = last_ends_s(plan, problem)
        users = tuple(replace(each, planned_s=ends_s[each.user]) for each in gain.users)
        return replace(answer, planned_s=self.makespan_s - makespan_s, users=users)

    def _gain(
        self, change: ProblemChange, *, on: str, by_prices_s: float, bound_s: float, makespan_s: float | None
    ) -> Gain:
        most_s = max(0.0, self.makespan_s - bound_s)
        least_s = 0.0 if makespan_s is None else min(most_s, max(0.0, self.bound_s - makespan_s))
        return Gain(
            change=change,
            on=on,
            least_s=least_s,
            most_s=most_s,
            most_by_prices_s=max(0.0, self.makespan_s - by_prices_s),
            bound_s=bound_s,
            makespan_s=makespan_s,
        )


def last_ends_s(plan: Plan, problem: Problem) -> dict[str, float]:
    """Returns the end of the last job of each user by a plan."""
    ends_s: dict[str, float] = {}
    for name, end_s in ends_of(plan, problem).items():
        user = problem.job(name).user
        ends_s[user] = max(end_s, ends_s.get(user, 0.0))
    return ends_s


def _proof(plan: Plan, problem: Problem) -> tuple[Certificate, float]:
    """Returns prices that prove a bound, those of the plan if it has any, and the bound in seconds."""
    certificate = plan.certificate
    if certificate is None:
        certificate = preemptive_bound(problem).certificate or Certificate()
    return certificate, min(certified_bound(certificate, problem), plan.makespan_s)
