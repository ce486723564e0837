"""Selection of the models that a retraining run trains: by priority, as many due models as fit, as one batch."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ringmaster.flows.batch.local_run import PLANNING_WORK_S
from ringmaster.flows.batch.result import failure_reporter
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.retraining.inspect_models import InspectedModel
from ringmaster.flows.retraining.retraining_run import RetrainingRun, current_clock
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.fusion import checked_fusion, groups_of
from ringmaster.tasks.planning.gantt import render_svg
from ringmaster.tasks.planning.objectives import Cost, Makespan, PlanningTerms
from ringmaster.tasks.planning.whatif.answers import section
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.profiling.stage import ProfilingResult, groups_of_some
from ringmaster.tasks.profiling.task import profile_task
from ringmaster.tasks.retraining.promotion import version_of
from ringmaster.tasks.retraining.selection import DueModel, RunLimits, RunSelection, choose
from ringmaster.techniques import Job


@dataclass(frozen=True, kw_only=True)
class SelectedModels:
    """The selection of a retraining run.

    batch: the batch to train; None for nothing.
    left: why a model, or its sweep, waits for a later run, by name.
    unfit: why a model cannot be trained on these devices, by name.
    num_trials, profiling_s: number and duration of the trials for missing profiles.
    plan: figures of the plan on which the selection is based.
    svg: Gantt chart of that plan.
    gains: what more devices would gain, in sentences.
    """

    batch: Batch | None = None
    left: Mapping[str, str] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    num_trials: int = 0
    profiling_s: float = 0.0
    plan: Mapping[str, Any] = field(default_factory=dict)
    svg: str = ""
    gains: Sequence[str] = ()

    def trains(self, name: str) -> bool:
        """Returns whether a job is trained."""
        return self.batch is not None and any(job.name == name for job in self.batch.jobs)


def select_models(run: RetrainingRun, checks: Mapping[str, InspectedModel]) -> SelectedModels:
    """Plans the due models against the run's deadline and budget, and selects those that fit."""
    value = run.step("chosen", lambda: _plain(_choose(run, checks)))
    return SelectedModels(**{**value, "batch": None if value["batch"] is None else Batch.from_json(value["batch"])})


def _choose(run: RetrainingRun, checks: Mapping[str, InspectedModel]) -> SelectedModels:
    due = {name: check for name, check in checks.items() if check.due is not None and check.due.is_due}
    if not due:
        return SelectedModels()
    jobs = {job.name: job for check in due.values() for job in _trainable_jobs(check)}
    began_s = time.monotonic()
    # If the run's deadline has passed, nothing is profiled either.
    profiled = (
        ProfilingResult(jobs=(), preflights={}, profiles={}) if _is_late(run) else _profiled(run, list(jobs.values()))
    )
    profiling_s = time.monotonic() - began_s
    limits = _limits(run)
    unfit = {name: profiled.faults[name] for name in due if name in profiled.faults}
    problem_of = _problems(run, profiled, limits)
    wanted = list(_wanted(run, {name: due[name] for name in due if name not in unfit}, profiled.faults))
    choice = choose(wanted, limits, problem_of=problem_of, make_plan=partial(_plan, limits))
    return SelectedModels(
        batch=_batch(run, [jobs[name] for name in choice.jobs], limits) if choice.jobs else None,
        left=choice.left,
        unfit=unfit,
        num_trials=profiled.num_trials,
        profiling_s=profiling_s,
        plan=_figures(choice, limits, problem_of),
        gains=_gains(choice, problem_of, device=run.node_context.cluster.device_kind()),
        svg="" if choice.plan is None else render_svg(choice.plan, problem_of(choice.jobs)),
    )


def _problems(run: RetrainingRun, profiled: ProfilingResult, limits: RunLimits) -> Callable[[Sequence[str]], Problem]:
    """Returns a function from job names to their planning problem, with the groups that they may be trained in."""
    node_context = run.node_context
    resolved = {job.name: job for job in profiled.jobs}
    groups_among = groups_of_some(
        profiled, environment=node_context.environment, cluster=node_context.cluster, known=node_context.known
    )

    def problem_of(names: Sequence[str]) -> Problem:
        chosen = [resolved[name] for name in names]
        name, groups = run.production.name, groups_among(names)
        problem = planning_problem(chosen, profiled.profiles, node_context.cluster, name=name, groups=groups)
        return _terms(limits, names).on(problem)

    return problem_of


def _plan(limits: RunLimits, problem: Problem) -> Plan:
    """Plans as the batch will be planned: jobs are trained together if that is better."""
    return checked_fusion(problem, work_s=PLANNING_WORK_S, seed=0, objective=_terms(limits, ()).objective).fused_plan


def _trainable_jobs(check: InspectedModel) -> Iterator[Job]:
    """Yields the model's job and those of its sweep, each based on a version of the champion, as an alias may move."""
    champion = check.serving.champion
    for job in check.model.trained_jobs:
        if check.model.warm_start and champion is not None:
            job = replace(job, base=f"models:/{check.model.registered_name}/{version_of(champion)}")
        yield job


def _profiled(run: RetrainingRun, jobs: Sequence[Job]) -> ProfilingResult:
    node_context, notice = run.node_context, current_view.get().notice
    return profile_task(
        jobs,
        environment=node_context.environment,
        cluster=node_context.cluster,
        known=node_context.known,
        notice=notice,
        lend=node_context.lend,
        failed=failure_reporter(),
        share=node_context.batch.profiling_share,
    )


def _is_late(run: RetrainingRun) -> bool:
    return run.deadline_s is not None and current_clock.get()() >= run.deadline_s


def _limits(run: RetrainingRun) -> RunLimits:
    production = run.production
    return RunLimits(
        left_s=None if run.deadline_s is None else run.deadline_s - current_clock.get()(),
        deadline_s=run.deadline_s,
        budget=production.budget,
        price_per_device_hour=production.price_per_device_hour,
    )


def _terms(limits: RunLimits, names: Sequence[str]) -> PlanningTerms:
    """Returns the terms: the run is to be cheap within its deadline if it has a budget, else it is to end soon."""
    return PlanningTerms(
        objective=Makespan.name if limits.budget is None else Cost.name,
        deadlines_s={} if limits.left_s is None else dict.fromkeys(names, limits.left_s),
        price_per_device_hour=limits.price_per_device_hour,
    )


def _wanted(run: RetrainingRun, due: Mapping[str, InspectedModel], faults: Mapping[str, str]) -> Iterator[DueModel]:
    waited = run.left_by_earlier("waited")
    for name, check in due.items():
        yield DueModel(
            model=name,
            job=name,
            variants=tuple(job.name for job in check.model.variants if job.name not in faults),
            priority=check.model.priority,
            waited=waited.get(name, 0),
        )


def _batch(run: RetrainingRun, jobs: Sequence[Job], limits: RunLimits) -> Batch:
    """Returns the run's batch. Its name, that of the production file, keeps the registered names stable."""
    terms = _terms(limits, [job.name for job in jobs])
    return Batch.of(
        name=run.production.name,
        jobs=jobs,
        objective=terms.objective,
        devices=run.production.devices,
        folder=run.production.folder,
        deadlines_s=terms.deadlines_s,
        price_per_device_hour=terms.price_per_device_hour,
    )


def _figures(choice: RunSelection, limits: RunLimits, problem_of: Callable[[Sequence[str]], Problem]) -> dict[str, Any]:
    if choice.plan is None:
        return {}
    plan = choice.plan
    groups = groups_of(plan, problem_of(choice.jobs))
    return {
        "makespan_s": plan.makespan_s,
        "lower_bound_s": plan.best_bound_s,
        "gap": plan.gap,
        "cost": choice.cost,
        "unit": limits.unit,
        "num_jobs": len(choice.jobs),
        "num_groups": len(groups),
        "num_fused": sum(1 + len(members) for members in groups.values()),
    }


def _plain(chosen: SelectedModels) -> dict[str, Any]:
    return {**vars(chosen), "batch": None if chosen.batch is None else chosen.batch.to_json()}


def _gains(choice: RunSelection, problem_of: Callable[[Sequence[str]], Problem], *, device: str) -> list[str]:
    return [] if choice.plan is None else section(choice.plan, problem_of(choice.jobs), device=device)
