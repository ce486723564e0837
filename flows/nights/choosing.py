"""What a night trains: as many of the models that are due as fit in it, by priority, as one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ringmaster.flows.batch_records import failures_told
from ringmaster.flows.local_executor import PLANNING_TIME_LIMIT_S
from ringmaster.flows.nights.looking import Checked
from ringmaster.flows.nights.night import Night, current_clock
from ringmaster.flows.views import current_view
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.checked import checked_fusion
from ringmaster.tasks.planning.fusion import groups_of
from ringmaster.tasks.planning.gantt import render_svg
from ringmaster.tasks.planning.terms import Terms
from ringmaster.tasks.profiling.options import planning_problem
from ringmaster.tasks.profiling.stage import Profiled, groups_of_some
from ringmaster.tasks.profiling.task import profile_task
from ringmaster.tasks.promotion.stage import version_of
from ringmaster.tasks.retraining.choosing import Choice, Limits, Wanted, choose
from ringmaster.techniques import Job

PROFILING_SHARE = 1.0  # of the batch's predicted time: what is measured serves every run after this one


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a night trains. batch: None for nothing. left: why a model waits for tomorrow, or its sweep does.

    unfit: why nothing here can train a model. num_trials, profiling_s: of measuring what was not known. plan: figures
    of the plan that it was chosen by; svg: a picture of that.
    """

    batch: Batch | None = None
    left: Mapping[str, str] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    num_trials: int = 0
    profiling_s: float = 0.0
    plan: Mapping[str, Any] = field(default_factory=dict)
    svg: str = ""

    def trains(self, name: str) -> bool:
        """Whether a job is trained."""
        return self.batch is not None and any(job.name == name for job in self.batch.jobs)


def choose_jobs(night: Night, checks: Mapping[str, Checked]) -> Chosen:
    """Plans the models that are due against the night's deadline and budget, with the profiles that there are."""
    said = night.step("chosen", lambda: _plain(_choose(night, checks)))
    return Chosen(**{**said, "batch": None if said["batch"] is None else Batch.from_json(said["batch"])})


def _choose(night: Night, checks: Mapping[str, Checked]) -> Chosen:
    due = {name: check for name, check in checks.items() if check.due is not None and check.due.is_due}
    if not due:
        return Chosen()
    jobs = {job.name: job for check in due.values() for job in _jobs(check)}
    began_s = time.monotonic()
    # Where the night is over already, nothing is measured for it, either.
    profiled = Profiled(jobs=(), surveys={}, profiles={}) if _is_late(night) else _profiled(night, list(jobs.values()))
    profiling_s = time.monotonic() - began_s
    limits = _limits(night)
    unfit = {name: profiled.faults[name] for name in due if name in profiled.faults}
    problem_of = _problems(night, profiled, limits)
    wanted = list(_wanted(night, {name: due[name] for name in due if name not in unfit}, profiled.faults))
    choice = choose(wanted, limits, problem_of=problem_of, make_plan=partial(_plan, limits))
    return Chosen(
        batch=_batch(night, [jobs[name] for name in choice.jobs], limits) if choice.jobs else None,
        left=choice.left,
        unfit=unfit,
        num_trials=profiled.num_trials,
        profiling_s=profiling_s,
        plan=_figures(choice, limits, problem_of),
        svg="" if choice.plan is None else render_svg(choice.plan, problem_of(choice.jobs)),
    )


def _problems(night: Night, profiled: Profiled, limits: Limits) -> Callable[[Sequence[str]], Problem]:
    """What gives the planning problem of jobs, by their names, with the groups that they could be trained in."""
    bench = night.bench
    resolved = {job.name: job for job in profiled.jobs}
    groups_among = groups_of_some(profiled, site=bench.site, cluster=bench.cluster, known=bench.known)

    def problem_of(names: Sequence[str]) -> Problem:
        chosen = [resolved[name] for name in names]
        name, groups = night.production.name, groups_among(names)
        problem = planning_problem(chosen, profiled.profiles, bench.cluster, name=name, groups=groups)
        return _terms(limits, names).on(problem)

    return problem_of


def _plan(limits: Limits, problem: Problem) -> Plan:
    """As the batch will be planned: jobs are trained together where that is better."""
    objective = _terms(limits, ()).objective
    return checked_fusion(problem, time_limit_s=PLANNING_TIME_LIMIT_S, seed=0, objective=objective).together


def _jobs(check: Checked) -> Iterator[Job]:
    """The model's job and those of its sweep, each from its champion, by version: an alias may move meanwhile."""
    champion = check.standing.champion
    for job in (check.model.job, *check.model.variants):
        if check.model.warm_start and champion is not None:
            job = replace(job, base=f"models:/{check.model.registered_name}/{version_of(champion)}")
        yield job


def _profiled(night: Night, jobs: Sequence[Job]) -> Profiled:
    bench, notice = night.bench, current_view.get().notice
    return profile_task(
        jobs,
        site=bench.site,
        cluster=bench.cluster,
        known=bench.known,
        notice=notice,
        lend=bench.lend,
        failed=failures_told(),
        share=max(bench.batch.profiling_share, PROFILING_SHARE),
    )


def _is_late(night: Night) -> bool:
    return night.deadline_s is not None and current_clock.get()() >= night.deadline_s


def _limits(night: Night) -> Limits:
    production = night.production
    return Limits(
        left_s=None if night.deadline_s is None else night.deadline_s - current_clock.get()(),
        deadline_s=night.deadline_s,
        budget=production.budget,
        price_per_device_hour=production.price_per_device_hour,
    )


def _terms(limits: Limits, names: Sequence[str]) -> Terms:
    """With a budget, the night is to be as cheap as its deadline allows; else it is to be over soon."""
    return Terms(
        objective="makespan" if limits.budget is None else "cost",
        deadlines_s={} if limits.left_s is None else dict.fromkeys(names, limits.left_s),
        price_per_device_hour=limits.price_per_device_hour,
    )


def _wanted(night: Night, due: Mapping[str, Checked], faults: Mapping[str, str]) -> Iterator[Wanted]:
    waited = night.left_by_earlier("waited")
    for name, check in due.items():
        yield Wanted(
            model=name,
            job=name,
            variants=tuple(job.name for job in check.model.variants if job.name not in faults),
            priority=check.model.priority,
            waited=waited.get(name, 0),
        )


def _batch(night: Night, jobs: Sequence[Job], limits: Limits) -> Batch:
    """The night's batch; its name makes the registered names stable."""
    terms = _terms(limits, [job.name for job in jobs])
    return Batch.of(
        name=night.production.name,
        jobs=jobs,
        objective=terms.objective,
        devices=night.production.devices,
        folder=night.production.folder,
        deadlines_s=terms.deadlines_s,
        price_per_device_hour=terms.price_per_device_hour,
    )


def _figures(choice: Choice, limits: Limits, problem_of: Callable[[Sequence[str]], Problem]) -> dict[str, Any]:
    if choice.plan is None:
        return {}
    plan = choice.plan
    groups = groups_of(plan, problem_of(choice.jobs))
    return {
        "makespan_s": plan.makespan_s,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "cost": choice.cost,
        "unit": limits.unit,
        "num_jobs": len(choice.jobs),
        "num_groups": len(groups),
        "num_fused": sum(1 + len(fellows) for fellows in groups.values()),
    }


def _plain(chosen: Chosen) -> dict[str, Any]:
    return {**vars(chosen), "batch": None if chosen.batch is None else chosen.batch.to_json()}
