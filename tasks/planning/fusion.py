"""Fusion: the choice of which jobs are trained together, made once before execution, and what it saves.

`divisions` divides the jobs into groups. The executor then sees each group as one job, named by its *lead*, whose
options also train the other *members* (`contracted`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ringmaster.tasks.planning.divisions import MIN_GAIN, Contracted, Contraction, FusedSearch
from ringmaster.tasks.planning.durations import seconds_text
from ringmaster.tasks.planning.objectives import lateness_s, objective_by_name
from ringmaster.tasks.planning.plan_search import Preemption
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.solve import solve, verified
from ringmaster.tasks.planning.work import TIME_LIMIT_S, WORK_S, WorkBudget

Groups = Mapping[str, tuple[str, ...]]
"""Members by lead; jobs that are trained alone are not listed."""


@dataclass(frozen=True)
class Fusion:
    """The chosen groups, and what they save.

    groups: members by lead.
    fused_plan: the best plan found of the problem.
    alone: the best plan found without fused options (`without_groups`).
    alone_is_late: without groups the jobs cannot meet their deadlines; `alone` is then a plan without deadlines.
    """

    groups: Groups
    fused_plan: Plan
    alone: Plan
    alone_is_late: bool = False

    @property
    def saved_s(self) -> float:
        """Seconds by which the last job ends earlier; negative where another objective prefers a later end."""
        return self.alone.makespan_s - self.fused_plan.makespan_s

    def in_words(self) -> str:
        """One line for the user, such as "fused 16 jobs into 2 groups: 63 s instead of 99 s, 36 % less"."""
        now, before = _objective_of(self.fused_plan), _objective_of(self.alone)
        if not self.groups:
            return f"no jobs are fused: trained alone they take {_amount_text(self.alone)}"
        num_jobs = sum(1 + len(members) for members in self.groups.values())
        groups = "1 group" if len(self.groups) == 1 else f"{len(self.groups)} groups"
        amounts = f"{_amount_text(self.fused_plan)} instead of {_amount_text(self.alone)}"
        text = f"fused {num_jobs} jobs into {groups}: {amounts}"
        text += f", {1 - now / before:.0%} less".replace("%", " %") if now < before else ""
        if self.fused_plan.value is None and self.fused_plan.best_bound_s:
            text += f"; at least {seconds_text(self.fused_plan.best_bound_s)} by the bound"
        return text + ("; trained alone they cannot meet their deadlines" if self.alone_is_late else "")

    def to_json(self) -> dict[str, Any]:
        """The groups and what they save, as a JSON object."""
        groups = {lead: list(members) for lead, members in self.groups.items()}
        alone = {"makespan": self.alone.makespan_s, "value": self.alone.value}
        return {"groups": groups, "saved": self.saved_s, "alone": alone, "words": self.in_words()}


def choose_groups(
    problem: Problem,
    *,
    work_s: float = WORK_S,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    preemption: Preemption = "auto",
    objective: str = "makespan",
) -> Fusion:
    """Divides the jobs of a problem with fused options into groups; into none where training alone is as good.

    The arguments are those of `solve`. Equal arguments give equal results, unless the time limit ends the search.
    Raises ProblemError where deadlines cannot be met even with groups.
    """
    work = WorkBudget.of(work_s, time_limit_s=time_limit_s)
    plan_one = partial(solve, seed=seed, preemption=preemption, objective=objective)
    if not problem.is_fused:
        plan = plan_one(problem, work=work)
        return Fusion({}, plan, plan)
    search = FusedSearch(
        problem,
        plan_one,
        work=work,
        preemption=preemption,
        objective=objective_by_name(objective),
    )
    search.run(with_alone=True)
    fused_plan, alone, is_late = search.proved(), search.alone, False
    if alone is None:
        jobs = tuple(replace(job, deadline_s=None) for job in without_groups(problem).jobs)
        free = replace(problem, jobs=jobs, budgets={})  # groups may keep budgets, too, that jobs alone exceed
        alone = plan_one(free, work=WorkBudget.of(work_s, time_limit_s=time_limit_s))
        is_late = any(job.deadline_s is not None for job in problem.jobs)
        is_late = is_late and (not problem.budgets or lateness_s(alone, without_groups(problem)) > 0)
    elif _objective_of(fused_plan) >= _objective_of(alone) * (1 - MIN_GAIN):
        fused_plan = _as_fused(alone, fused_plan, problem)
    return Fusion(groups_of(fused_plan, problem), fused_plan, alone, is_late)


def without_groups(problem: Problem) -> Problem:
    """Returns the problem with every job alone.

    An option's index there counts only the options that train no other jobs.
    """
    return contracted(problem, {}).problem


def groups_of(plan: Plan, problem: Problem) -> Groups:
    """Returns the groups of a plan, members by lead: the lead owns the options under which the group is trained.

    Raises ValueError where a job is not trained in the same group from its first step to its last.
    """
    group_of: dict[str, tuple[str, tuple[str, ...]]] = {}
    for segment in plan.segments:
        members = problem.job(segment.job).options[segment.option].jobs
        for name in (segment.job, *members):
            lead, others = group_of.setdefault(name, (segment.job, members))
            if lead != segment.job or set(others) != set(members):
                raise ValueError(f"job {name} is not trained in one group throughout, under the options of one job")
    return {lead: members for lead, members in group_of.values() if members}


def contracted(problem: Problem, groups: Groups) -> Contracted:
    """Returns the problem that is left to plan once groups are chosen: each group is one job, named by its lead.

    `Contracted.expanded` maps its plans to plans of the problem. Raises ValueError where there is no such group.
    """
    rows = [frozenset((lead, *members)) for lead, members in groups.items()]
    grouped: frozenset[str] = frozenset().union(*rows)
    for lead, members in groups.items():
        known = {job.id: job for job in problem.jobs}
        if lead not in known or not any(set(o.jobs) == set(members) for o in known[lead].options):
            raise ValueError(f"job {lead} has no option that carries {', '.join(members)}")
    if sum(map(len, rows)) != len(grouped):
        raise ValueError("a job is named in several groups")
    alone = [frozenset((job.id,)) for job in problem.jobs if job.id not in grouped]
    whole = Contraction(problem).of([*rows, *alone])
    if whole is None:
        raise ValueError("the groups wait for each other in a cycle")
    return whole


def as_executed(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Returns a problem and a plan of it as they are executed: each group of the plan is one job.

    The plan's bound does not hold for the new problem and is left out. Raises ValueError as `groups_of` does.
    """
    if not problem.is_fused:
        return problem, plan
    whole = contracted(problem, groups_of(plan, problem))
    indices = {place: (name, i) for name, places in whole.places.items() for i, place in enumerate(places)}
    index_of = {job.id: j for j, job in enumerate(problem.jobs)}
    segments = []
    for segment in plan.segments:
        name, option = indices[index_of[segment.job], segment.option]
        segments.append(replace(segment, job=name, option=option))
    bare = Plan(plan.problem_name, tuple(segments), method=plan.method, objective=plan.objective, value=plan.value)
    return whole.problem, bare


def _as_fused(alone: Plan, fused_plan: Plan, problem: Problem) -> Plan:
    """Returns the plan with every job alone as a plan of the fused problem, with that problem's bounds."""
    segments = contracted(problem, {}).expanded(alone, problem)
    plan = replace(fused_plan, segments=segments, method=alone.method, seconds=fused_plan.seconds)
    return plan if plan.value is None else replace(plan, value=objective_by_name(plan.objective).value(plan, problem))


def _objective_of(plan: Plan) -> float:
    return plan.makespan_s if plan.value is None else plan.value


def _amount_text(plan: Plan) -> str:
    if plan.value is None:
        return seconds_text(plan.makespan_s)
    return f"a {plan.objective} of {plan.value:.4g}"


def checked_fusion(problem: Problem, *, work_s: float, seed: int, objective: str = "makespan") -> Fusion:
    """Chooses fused groups and checks their plan with the independent verifier. Raises ProblemError as `solve` does."""
    fusion = choose_groups(problem, work_s=work_s, seed=seed, objective=objective)
    verified(fusion.fused_plan, problem)
    return fusion
