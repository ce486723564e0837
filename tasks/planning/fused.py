"""Fused groups: some options train several jobs at once, so jobs are divided into groups before they are planned.

The pattern LP knows fused options like any other, and a MILP over it gives the division that it likes best. Each group
becomes one job of an ordinary problem, which is planned as usual, and its segments are put back under the options that
they stand for. The bound is the fused problem's own, so the gap tells what the division may have lost.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tasks.planning.bounds import Bound, by_area, preemptive_bound, rigid_bound
from tasks.planning.certificates import cost_bound, weighted_bound
from tasks.planning.listing import NoRoomError
from tasks.planning.pattern_model import Group, Integral, PatternModel, members_of
from tasks.planning.plan import Plan, Segment
from tasks.planning.problem import PlanningJob, Problem, ProblemError, Running
from tasks.planning.problem_faults import cycle_in
from tasks.planning.verify import objective_value

MAX_JUDGED = 150  # divisions whose bound is computed by the local search
MAX_PLANNED = 6  # divisions that are planned
GAIN = 1e-4  # that a division must promise, as a share of the best plan, to be planned

Division = frozenset[Group]
Place = tuple[int, int]  # index of a job, index of its option


class Solve(Protocol):
    """Plans an ordinary problem; raises ProblemError where its deadlines cannot be met."""

    def __call__(self, problem: Problem, *, time_limit_s: float) -> Plan:
        """The best plan found."""


@dataclass(frozen=True)
class Contracted:
    """A problem with one job a group; places[job id][k] is what its option k stands for."""

    problem: Problem
    places: dict[str, tuple[Place, ...]]

    def expanded(self, plan: Plan, problem: Problem) -> tuple[Segment, ...]:
        """A plan's segments as those of the fused problem."""
        segments = []
        for segment in plan.segments:
            j, k = self.places[segment.job][segment.option]
            segments.append(replace(segment, job=problem.jobs[j].id, option=k))
        return tuple(segments)


def solve_fused(problem: Problem, solve: Solve, *, time_limit_s: float, preemption: str, objective: str) -> Plan:
    """The best plan found over divisions of the jobs into groups. Raises ProblemError where no deadlines are met."""
    search = _Search(problem, solve, time_limit_s, objective)
    search.run()
    return search.proved(preemption)


class _Search:
    """Divisions in the order of what their bounds promise; a few of them are planned."""

    def __init__(self, problem: Problem, solve: Solve, time_limit_s: float, objective: str) -> None:
        self.problem, self.solve, self.objective = problem, solve, objective
        self.ends_at = time.monotonic() + time_limit_s
        self.best: Plan | None = None
        self.best_value = float("inf")
        self.faults: tuple[str, ...] = ()
        self.planned: set[Division] = set()
        self.promised: dict[Division, float] = {}

    def run(self) -> None:
        began = time.monotonic()
        self.bound = preemptive_bound(self.problem)
        for division in (*self._chosen(), self._division([])):
            self._promise(division)
        now = min(self.promised, key=lambda division: self.promised[division])
        self._climb(now)
        self.seconds = {"division": round(time.monotonic() - began, 3)}
        for division in sorted(self.promised, key=lambda division: self.promised[division]):
            if len(self.planned) < MAX_PLANNED and not (self.best and self._is_over()):
                self._plan(division)
        self._plan(self._division([]))  # every job alone: never worse than without fusing

    def proved(self, preemption: str) -> Plan:
        """The best plan with the bound of the fused problem."""
        if self.best is None:
            from tasks.planning.deadlines import conflicts

            raise ProblemError([*conflicts(self.problem)] or self.faults)
        lower_s, proof = self.bound.seconds, self.bound.proof
        certificate = self.bound.certificate
        if preemption == "never":
            rigid_s, _ = rigid_bound(self.problem, time_limit_s=min(5.0, self._left_s()))
            if rigid_s > lower_s:
                lower_s, certificate, proof = rigid_s, None, "pattern MILP"
        plan = replace(
            self.best,
            lower_bound_s=min(lower_s, self.best.makespan_s),
            certificate=certificate,
            proof=proof,
            seconds={**self.seconds, **self.best.seconds},
        )
        if self.objective == "makespan":
            return plan
        bound = min(_value_bound(self.problem, self.bound, self.objective), self.best_value)
        return replace(plan, objective=self.objective, value=self.best_value, value_bound=bound)

    def _left_s(self) -> float:
        return max(0.1, self.ends_at - time.monotonic())

    def _is_over(self) -> bool:
        return time.monotonic() > self.ends_at

    def _chosen(self) -> Iterator[Division]:
        """The division that the MILP likes best, if it finds one."""
        unit_s = self.bound.seconds
        if 0 < unit_s < float("inf"):
            model = PatternModel(self.problem, unit_s=unit_s, integral=Integral.GROUPS)
            model.solve(time_limit_s=min(5.0, self._left_s()))
            groups = model.chosen_groups()
            if groups is not None:
                yield self._division(groups)

    def _division(self, groups: Iterable[Group]) -> Division:
        """The groups, the one of every pinned job whatever else, and all other jobs alone."""
        pinned = [
            members_of(job, job.options[job.running.option])
            for job in self.problem.jobs
            if job.running is not None and job.running.pinned_until_s > 0
        ]
        formed: list[Group] = []
        for group in (*pinned, *groups):
            if not any(group & other for other in formed):
                formed.append(group)
        grouped: frozenset[str] = frozenset().union(*formed)
        return frozenset((*formed, *(frozenset((job.id,)) for job in self.problem.jobs if job.id not in grouped)))

    def _promise(self, division: Division) -> float:
        """What no plan of a division beats; infinite where its groups would wait for each other."""
        if division not in self.promised:
            contracted = contract(self.problem, division)
            if contracted is None:
                return float("inf")
            bound = preemptive_bound(contracted.problem)
            self.promised[division] = _value_bound(contracted.problem, bound, self.objective)
        return self.promised[division]

    def _climb(self, now: Division) -> None:
        """Groups are formed, breaking up those that they overlap, or broken up, as long as the bound gets better."""
        promised, left = self._promise(now), MAX_JUDGED
        known = _groups(self.problem)
        is_better = True
        while is_better and left > 0:
            is_better = False
            for group in known:
                others = [other for other in now if len(other) > 1 and not other & group]
                trial = self._division(others if group in now else [*others, group])
                if trial in self.promised or left <= 0 or self._is_over():
                    continue
                left -= 1
                if (value := self._promise(trial)) < promised * (1 - 1e-6):
                    now, promised, is_better = trial, value, True

    def _plan(self, division: Division) -> None:
        if division in self.planned or self._promise(division) >= self.best_value * (1 - GAIN):
            return
        self.planned.add(division)
        contracted = contract(self.problem, division)
        assert contracted is not None, "a division with a finite promise has an order"
        try:
            found = self.solve(contracted.problem, time_limit_s=self._left_s())
        except (ProblemError, NoRoomError) as error:
            self.faults = getattr(error, "faults", (str(error),))
            return
        plan = replace(found, segments=contracted.expanded(found, self.problem))
        value = objective_value(plan, self.problem, self.objective)
        if value < self.best_value:
            num_groups = sum(len(group) > 1 for group in division)
            self.best_value = value
            self.best = replace(plan, method=f"{plan.method}, {num_groups} fused groups" if num_groups else plan.method)


def contract(problem: Problem, groups: Iterable[Group]) -> Contracted | None:
    """The problem with each group as one job, or None where groups would wait for each other in a cycle."""
    group_of = {name: group for group in groups for name in group}
    rows: dict[Group, list[Place]] = {}
    for j, job in enumerate(problem.jobs):
        for k, option in enumerate(job.options):
            members = members_of(job, option)
            if group_of[job.id] == members:
                rows.setdefault(members, []).append((j, k))
    names: dict[Group, str] = {}
    for job in problem.jobs:
        names.setdefault(group_of[job.id], job.id)
    jobs = tuple(
        _as_one([job for job in problem.jobs if job.id in group], rows[group], problem, name, group_of, names)
        for group, name in names.items()
    )
    if cycle_in({job.id: job.after for job in jobs}):
        return None
    return Contracted(
        Problem(problem.name, problem.nodes, jobs, problem.switch_cost_s),
        {name: tuple(rows[group]) for group, name in names.items()},
    )


def _as_one(
    members: Sequence[PlanningJob],
    places: Sequence[Place],
    problem: Problem,
    name: str,
    group_of: dict[str, Group],
    names: dict[Group, str],
) -> PlanningJob:
    """A group as one job: it starts when all may, is due when the first is, and weighs as much as all."""
    own = {job.id for job in members}
    after = dict.fromkeys(names[group_of[other]] for job in members for other in job.after if other not in own)
    due = [job.deadline_s for job in members if job.deadline_s is not None]
    running: Running | None = None
    for new, (j, k) in enumerate(places):
        old = problem.jobs[j].running
        if old is not None and old.option == k:
            running = replace(old, option=new)
    return PlanningJob(
        id=name,
        options=tuple(replace(problem.jobs[j].options[k], jobs=()) for j, k in places),
        after=tuple(after),
        release_s=max(job.release_s for job in members),
        deadline_s=min(due, default=None),
        weight=sum(job.weight for job in members),
        running=running,
        started=any(job.started for job in members),
    )


def _groups(problem: Problem) -> list[Group]:
    """The groups that options can train together, in the order of the problem."""
    found = (members_of(job, option) for job in problem.jobs for option in job.options if option.jobs)
    return list(dict.fromkeys(found))


def _value_bound(problem: Problem, bound: Bound, objective: str) -> float:
    if objective == "cost":
        return cost_bound(problem)
    if objective == "weighted":
        return max(weighted_bound(prices, problem) for prices in (by_area(problem), bound.certificate) if prices)
    return bound.seconds
