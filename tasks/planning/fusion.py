"""Which jobs are trained together: decided once, before anything runs, with what that saves.

Jobs are divided into groups by `fused`. Who carries the plan out then sees each group as one job, its *leader*, whose
options carry the others, its *fellows* (`contracted`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ringmaster.tasks.planning.contraction import Contracted, contract
from ringmaster.tasks.planning.drawing import seconds_text
from ringmaster.tasks.planning.fused import LEAST_GAIN, FusedSearch
from ringmaster.tasks.planning.plan import Plan
from ringmaster.tasks.planning.problem import Problem
from ringmaster.tasks.planning.search import Objective, Preemption
from ringmaster.tasks.planning.solve import solve
from ringmaster.tasks.planning.verify import objective_value

Groups = Mapping[str, tuple[str, ...]]
"""Fellows by leader; jobs that are alone are not named."""


@dataclass(frozen=True)
class Fusion:
    """Which jobs are trained together, and what that saves.

    together: the best plan found of the problem. alone: of the same without its fused options, `without_groups`.
    alone_is_late: by themselves the jobs cannot meet their deadlines, which `alone` leaves out then.
    """

    groups: Groups
    together: Plan
    alone: Plan
    alone_is_late: bool = False

    @property
    def saved_s(self) -> float:
        """By how much the last job ends earlier; negative where another objective asked for that."""
        return self.alone.makespan_s - self.together.makespan_s

    def in_words(self) -> str:
        """One line for a person, such as "fused 16 jobs into 2 groups: 63 s instead of 99 s, 36 % less"."""
        now, before = _objective_of(self.together), _objective_of(self.alone)
        if not self.groups:
            return f"no jobs are fused: by themselves they take {_said(self.alone)}"
        num_jobs = sum(1 + len(fellows) for fellows in self.groups.values())
        groups = "1 group" if len(self.groups) == 1 else f"{len(self.groups)} groups"
        said = f"fused {num_jobs} jobs into {groups}: {_said(self.together)} instead of {_said(self.alone)}"
        said += f", {1 - now / before:.0%} less".replace("%", " %") if now < before else ""
        if self.together.objective == "makespan" and self.together.lower_bound_s:
            said += f"; at least {seconds_text(self.together.lower_bound_s)} by the bound"
        return said + ("; by themselves they cannot meet their deadlines" if self.alone_is_late else "")

    def to_json(self) -> dict[str, Any]:
        """The groups, and what they save, as a JSON object."""
        groups = {leader: list(fellows) for leader, fellows in self.groups.items()}
        alone = {"makespan": self.alone.makespan_s, "value": self.alone.value}
        return {"groups": groups, "saved": self.saved_s, "alone": alone, "words": self.in_words()}


def choose_groups(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    preemption: Preemption = "auto",
    objective: Objective = "makespan",
) -> Fusion:
    """Divides the jobs of a problem with fused options into groups, none where being alone is as good.

    Arguments are as of `solve`; equal ones give equal answers, as long as the time limit is not reached. Raises
    ProblemError where deadlines cannot be met even so.
    """
    plan_one = partial(solve, seed=seed, preemption=preemption, objective=objective)
    if not problem.is_fused:
        plan = plan_one(problem, time_limit_s=time_limit_s)
        return Fusion({}, plan, plan)
    search = FusedSearch(problem, plan_one, time_limit_s=time_limit_s, preemption=preemption, objective=objective)
    search.run(with_alone=True)
    together, alone, is_late = search.proved(), search.alone, False
    if alone is None:
        jobs = tuple(replace(job, deadline_s=None) for job in without_groups(problem).jobs)
        alone = plan_one(replace(problem, jobs=jobs), time_limit_s=time_limit_s)
        is_late = any(job.deadline_s is not None for job in problem.jobs)
    elif _objective_of(together) >= _objective_of(alone) * (1 - LEAST_GAIN):
        together = _as_fused(alone, together, problem)
    return Fusion(groups_of(together, problem), together, alone, is_late)


def without_groups(problem: Problem) -> Problem:
    """The problem with every job by itself: an option's index counts those without `jobs` alone."""
    found = contract(problem, [frozenset((job.id,)) for job in problem.jobs])
    assert found is not None, "jobs by themselves wait as they did"
    return found.problem


def groups_of(plan: Plan, problem: Problem) -> Groups:
    """Fellows by leader of a plan's groups: the leader owns the options that the group is trained under.

    Raises ValueError where a job is not trained in one and the same group from its first step to its last.
    """
    group_of: dict[str, tuple[str, tuple[str, ...]]] = {}
    for segment in plan.segments:
        fellows = problem.job(segment.job).options[segment.option].jobs
        for name in (segment.job, *fellows):
            leader, others = group_of.setdefault(name, (segment.job, fellows))
            if leader != segment.job or set(others) != set(fellows):
                raise ValueError(f"job {name} is not trained in one group throughout, under the options of one job")
    return {leader: fellows for leader, fellows in group_of.values() if fellows}


def contracted(problem: Problem, groups: Groups) -> Contracted:
    """The problem that is left to plan once groups are chosen: each is one job, which has its leader's name.

    Its plans stand for plans of the problem, `Contracted.expanded`. Raises ValueError where there is no such group.
    """
    rows = [frozenset((leader, *fellows)) for leader, fellows in groups.items()]
    grouped: frozenset[str] = frozenset().union(*rows)
    for leader, fellows in groups.items():
        known = {job.id: job for job in problem.jobs}
        if leader not in known or not any(set(o.jobs) == set(fellows) for o in known[leader].options):
            raise ValueError(f"job {leader} has no option that carries {', '.join(fellows)}")
    if sum(map(len, rows)) != len(grouped):
        raise ValueError("a job is named in several groups")
    alone = [frozenset((job.id,)) for job in problem.jobs if job.id not in grouped]
    found = contract(problem, [*rows, *alone])
    if found is None:
        raise ValueError("the groups wait for each other in a cycle")
    return found


def as_executed(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """A problem, and a plan of it, as those of its groups are carried out: each group of the plan is one job.

    The plan's bound is not that of the new problem, and is left out. Raises ValueError as `groups_of`.
    """
    if not problem.is_fused:
        return problem, plan
    found = contracted(problem, groups_of(plan, problem))
    indices = {place: (name, i) for name, places in found.places.items() for i, place in enumerate(places)}
    index_of = {job.id: j for j, job in enumerate(problem.jobs)}
    segments = []
    for segment in plan.segments:
        name, option = indices[index_of[segment.job], segment.option]
        segments.append(replace(segment, job=name, option=option))
    bare = Plan(plan.problem_name, tuple(segments), method=plan.method, objective=plan.objective, value=plan.value)
    return found.problem, bare


def _as_fused(alone: Plan, together: Plan, problem: Problem) -> Plan:
    """The plan with every job alone as one of the fused problem, with the bounds of that."""
    found = contract(problem, [frozenset((job.id,)) for job in problem.jobs])
    assert found is not None, "jobs by themselves wait as they did"
    plan = replace(together, segments=found.expanded(alone, problem), method=alone.method, seconds=together.seconds)
    return plan if plan.value is None else replace(plan, value=objective_value(plan, problem, plan.objective))


def _objective_of(plan: Plan) -> float:
    return plan.makespan_s if plan.value is None else plan.value


def _said(plan: Plan) -> str:
    if plan.value is None:
        return seconds_text(plan.makespan_s)
    return f"a {plan.objective} of {plan.value:.4g}"
