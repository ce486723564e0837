"""Choice of the models that a retraining run trains: what is due by their current data, and how much of it fits.

The inspection freezes the data of the run. Of the due models, as many as fit are trained, by priority, as one batch.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.errors import BatchFileError, InputError
from ringmaster.flows import settings
from ringmaster.flows.batch.local_run import PLANNING_WORK_S
from ringmaster.flows.batch.result import failure_reporter
from ringmaster.flows.batch.run_folder import with_models
from ringmaster.flows.retraining.new_data_rules import rule_of
from ringmaster.flows.retraining.retraining_run import RetrainingRun
from ringmaster.flows.retraining.shrinking import SMALLER
from ringmaster.model_lineage import ModelRecord
from ringmaster.model_lineage.ledger.families import unless_lost
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.evaluation.model_assertions import Log, check, importable
from ringmaster.tasks.evaluation.suite import load_suite
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.fusion import checked_fusion, groups_of
from ringmaster.tasks.planning.gantt import render_svg
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.planning.term_features import terms_features
from ringmaster.tasks.pool.active_batches import with_features_of_pool
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.profiling.stage import ProfilingResult, groups_of_some
from ringmaster.tasks.profiling.task import profile_task
from ringmaster.tasks.recording.record_hooks import plan_sentences
from ringmaster.tasks.retraining import drift
from ringmaster.tasks.retraining.drift import Drift, TrainingRecord, drifts_of
from ringmaster.tasks.retraining.production import ProductionModel, with_tokenizer_of
from ringmaster.tasks.retraining.promotion import (
    TRAINED,
    ServingVersions,
    lasting,
    training_digest,
    version_of,
)
from ringmaster.tasks.retraining.runs import FrozenData, freeze
from ringmaster.tasks.retraining.selection import (
    IN_MONEY,
    DueDecision,
    DueModel,
    ModelObservations,
    RunLimits,
    RunSelection,
    choose,
    due,
    has_prices,
)
from ringmaster.tasks.storage.database import Database
from ringmaster.techniques import Job


@dataclass(frozen=True, kw_only=True)
class InspectedModel:
    """The result of inspecting a model before training.

    model: the model, with the tokenizer of its champion and the copied files of this run.
    serving: its versions in the registry.
    champion_dir: the champion's files.
    data: the JSON form of the prepared data.
    files: the data files, as (name, digest).
    due: whether the model is due; None if the data could not be read.
    fault: why the data could not be read.
    newest_before: its newest version at the inspection. None if there was none, or if the run was begun by an earlier
        release, which did not store it.
    measured: what the model's rule for new data has measured, in JSON.
    """

    model: ProductionModel
    serving: ServingVersions
    champion_dir: Path | None = None
    data: Mapping[str, Any] | None = None
    files: tuple[tuple[str, str], ...] = ()
    due: DueDecision | None = None
    fault: str = ""
    newest_before: int | None = None
    measured: Mapping[str, Any] | None = None

    def has_made(self, newest: ModelRecord | None) -> bool:
        """Returns whether this run has trained the newest version: on its data, and after the inspection.

        The data alone is not sufficient: a model that is due by its age, or by force, has a version of the same data.
        """
        if newest is None or self.data is None or training_digest(newest) != self.data["digest"]:
            return False
        return self.newest_before is None or version_of(newest) > self.newest_before


def inspect_models(run: RetrainingRun) -> dict[str, InspectedModel]:
    """Returns the inspection of each model; the result of an earlier process of this run takes precedence."""
    where = run.standings()
    seen: Mapping[str, Any] = run.step("looked", lambda: {name: _plain(c) for name, c in _fresh(run, where).items()})
    models = {model.name: model for model in run.production.models}
    return {name: _read(run, models[name], where, value) for name, value in seen.items() if name in models}


def _fresh(run: RetrainingRun, where: Mapping[str, ServingVersions]) -> dict[str, InspectedModel]:
    result = {}
    for model in run.production.models:
        serving = where[model.registered_name]
        check = InspectedModel(model=model, serving=serving, fault=serving.fault)
        try:
            result[model.name] = check if check.fault else _frozen(run, check)
        except (ValueError, OSError) as error:
            result[model.name] = replace(check, fault=lasting(error))
    readable = [check.model for check in result.values() if not check.fault]
    preflights, faults = run.preflight(
        [job for model in readable for job in model.jobs],
        evaluated=[job.name for model in readable for job in model.jobs if job is not model.job],
    )
    data = {name: preflight.data for name, preflight in preflights.items()}
    return {name: check if check.fault else _decided(run, check, data, faults) for name, check in result.items()}


def _frozen(run: RetrainingRun, check: InspectedModel) -> InspectedModel:
    """Returns the check with copies of the model's files, and the tokenizer of its champion."""
    model, champion = check.model, check.serving.champion
    folder = None if champion is None else run.download(champion)
    copies = partial(freeze, run_date=run.date, folder=run.folder / "data")
    window_days, frozen = _frozen_window(run, model, copies)
    model = model.with_jobs(
        lambda job: replace(job, data=frozen.data),
        others=lambda job: replace(job, data=copies(job.data, window_days=None).data),
    )
    model = replace(with_tokenizer_of(folder, model), window_days=window_days)
    return replace(check, model=model, champion_dir=folder, files=frozen.files)


def _frozen_window(
    run: RetrainingRun, model: ProductionModel, copies: Callable[..., FrozenData]
) -> tuple[int | None, FrozenData]:
    """Returns the days that the run reads, and copies of their files: of the first window that has some."""
    faults = []
    for days in [model.window_days] if (rule := rule_of(model)) is None else rule.windows(run, model):
        try:
            return days, copies(model.job.data, window_days=days)
        except ValueError as error:
            faults.append(error)
    raise faults[0]


def _decided(
    run: RetrainingRun, check: InspectedModel, data: Mapping[str, Any], faults: Mapping[str, str]
) -> InspectedModel:
    """Returns the check with the decision whether the model is due."""
    model, serving = check.model, check.serving
    if model.name in faults:
        return replace(check, fault=faults[model.name])
    own, missing = data[model.name], list[str]()
    if serving.foreign is not None:
        missing.append(
            f"version {serving.foreign} was made neither by retraining nor as a challenger, and is not compared. "
            "To fix: decide about it by `ringmaster promote`"
        )
    newest, champion = serving.latest, serving.champion
    by_rule = None
    if (rule := rule_of(model)) is not None and champion is not None and check.champion_dir is not None:
        by_rule = rule.decide(run, model, champion, check.champion_dir, data)
        missing += [by_rule.missing] * bool(by_rule.missing)
    seen = ModelObservations(
        run_date=run.date,
        digest=own["digest"],
        num_samples=own["num_samples"],
        trained=None if newest is None or model.rules.max_age_days is None else _run_of_training(run, newest),
        drifts=tuple(_drifts(run, model, champion, data, faults, missing)),
        failed_assertions=tuple(_failed(model, missing)),
        missing=tuple(missing),
        only_older=model.window_days is not None and _only_lost_files(run, check),
        had_champion=model.name in run.left_by_earlier("champions"),
        is_forced=model.name in run.forced,
        by_rule=None if by_rule is None else by_rule.decision,
    )
    measured = None if by_rule is None else by_rule.measured
    return replace(check, data=own, due=due(serving, seen, model.rules), measured=measured)


def trained_of(run: RetrainingRun, model: ModelRecord) -> TrainingRecord | None:
    """Returns what a retraining run stored about a model's training; None if the model was trained otherwise."""
    text = None if model.run_id is None else unless_lost(run.ledger.read_text, model.run_id, TRAINED)
    return None if text is None else from_json(TrainingRecord, json.loads(text))


def _only_lost_files(run: RetrainingRun, check: InspectedModel) -> bool:
    """Returns whether the champion or the newest version was trained on every file of this run already."""
    known = [model for model in (check.serving.champion, check.serving.latest) if model is not None]
    kept = [trained for model in known if (trained := trained_of(run, model)) is not None]
    read = {file for trained in kept for file in trained.files}
    return bool(check.files) and read.issuperset(check.files)


def _run_of_training(run: RetrainingRun, model: ModelRecord) -> str | None:
    """Returns the date of the run that trained a version; for other versions, of the time when their training began."""
    if (kept := trained_of(run, model)) is not None:
        return kept.run_date
    if model.run_id is None:
        return None
    made_by = unless_lost(run.ledger.client.get_run, model.run_id)
    return None if made_by is None else run.production.entry.night.run_date_of(made_by.info.start_time / 1000)


def _drifts(
    run: RetrainingRun,
    model: ProductionModel,
    champion: ModelRecord | None,
    data: Mapping[str, Any],
    faults: Mapping[str, str],
    missing: list[str],
) -> Iterator[Drift]:
    """Yields the drift of inputs and of predictions, relative to the champion's training data."""
    rule = model.rules.drift
    if rule is None or champion is None:
        return
    kept = trained_of(run, champion)
    if kept is None:
        missing.append("drift cannot be measured: no retraining run has trained its champion")
        return
    name = model.name if model.inputs is None else model.inputs.name
    if name in faults:
        missing.append(f"the inputs cannot be read: {faults[name]}")
    else:
        yield from drifts_of(kept.inputs, drift.input_features(Path(data[name]["folder"])), rule)
    if rule.predictions is None:
        return
    if not kept.predictions:
        missing.append("drift of predictions cannot be measured: none were stored for its champion")
        return
    try:
        logged = drift.logged_features(Log(model.folder / rule.predictions))
    except ValueError as error:
        missing.append(str(error))
        return
    yield from drifts_of(kept.predictions, logged, rule)


def _failed(model: ProductionModel, missing: list[str]) -> Iterator[str]:
    """Yields the assertions that fail on what was logged."""
    if (asserted := model.rules.assertions) is None:
        return
    file = model.folder / asserted.suite
    try:
        suite = load_suite(file)
        with importable(file.parent):
            results = check(suite.assertions, Log(model.folder / asserted.predictions))
    except (BatchFileError, ValueError) as error:
        missing.append(str(error))
        return
    for result in results:
        if not result.passed:
            text = result.why or f"{result.num_failures} of {result.num_rows} rows fail"
            yield f"assertion {result.assertion}: {text}"


def _plain(check: InspectedModel) -> dict[str, Any]:
    """Returns what is saved of a check."""
    model = check.model
    return {
        "job": to_json(model.job),
        "variants": to_json(model.variants),
        "compare_on": to_json(model.compare_on),
        "champion": None if check.serving.champion is None else version_of(check.serving.champion),
        "newest": None if check.serving.latest is None else version_of(check.serving.latest),
        "data": to_json(check.data),
        "files": to_json(check.files),
        "copies": [path for job in model.jobs for path in (job.data.path, job.data.held_out_path) if path is not None],
        "due": to_json(check.due),
        "measured": check.measured,
        "window_days": model.window_days,
        "fault": check.fault,
    }


def _read(
    run: RetrainingRun, model: ProductionModel, where: Mapping[str, ServingVersions], fields: Mapping[str, Any]
) -> InspectedModel:
    """Restores a saved check; the champion to compare with is the current one."""
    serving = where[model.registered_name]
    return InspectedModel(
        model=replace(
            model,
            job=from_json(Job, fields["job"]),
            variants=tuple(from_json(Job, job) for job in fields["variants"]),
            compare_on=None if fields["compare_on"] is None else from_json(Job, fields["compare_on"]),
            window_days=fields.get("window_days", model.window_days),
        ),
        serving=serving,
        champion_dir=None if serving.champion is None or fields["fault"] else run.download(serving.champion),
        data=fields["data"],
        files=tuple((name, stamp) for name, stamp in fields["files"]),
        due=None if fields["due"] is None else from_json(DueDecision, fields["due"]),
        fault=fields["fault"],
        newest_before=fields.get("newest"),
        measured=fields.get("measured"),
    )


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

    def plain() -> dict[str, Any]:
        chosen = _plan_selection(run, checks)
        return {**vars(chosen), "batch": None if chosen.batch is None else chosen.batch.to_json()}

    value = run.step("chosen", plain)
    return SelectedModels(**{**value, "batch": None if value["batch"] is None else Batch.from_json(value["batch"])})


def _plan_selection(run: RetrainingRun, checks: Mapping[str, InspectedModel]) -> SelectedModels:
    """Selects the due models that a plan shows to fit.

    `train_batch` plans the selected batch once more, by what the machine's load and the deadline are then.
    """
    due = {name: check for name, check in checks.items() if check.due is not None and check.due.is_due}
    if not due:
        return SelectedModels()
    production, context = run.production, run.node_context
    jobs = {job.name: job for check in due.values() for job in _trainable_jobs(run, check)}
    based, weights, faults = _with_bases(run, jobs)
    environment = replace(context.environment, weights=weights)
    began_s = time.monotonic()
    # If the run's deadline has passed, nothing is profiled either.
    profiled = ProfilingResult(jobs=(), preflights={}, profiles={})
    if based and not run.is_late:
        profiled = profile_task(
            based,
            environment=environment,
            cluster=context.cluster,
            profile_store=context.profile_store,
            notice=run.caller.view.notice,
            lend=context.lend,
            failed=failure_reporter(run.caller.view),
            share=context.batch.profiling_share,
        )
    profiling_s = time.monotonic() - began_s
    faults |= profiled.faults
    limits = RunLimits(
        left_s=run.left_s,
        deadline_s=run.deadline_s,
        budget=production.entry.night.budget,
        price_per_device_hour=production.entry.night.price_per_device_hour,
    )
    resolved = {job.name: job for job in profiled.jobs}
    terms = _terms(run, limits)
    groups_among = groups_of_some(
        profiled, environment=environment, cluster=context.cluster, profile_store=context.profile_store
    )

    def problem_of(names: Sequence[str]) -> Problem:
        """Returns the planning problem of some jobs, with the groups that they may be trained in."""
        chosen, groups = [resolved[name] for name in names], groups_among(names)
        problem = planning_problem(chosen, profiled.profiles, context.cluster, name=production.name, groups=groups)
        return _due_in_time(terms, limits, names).on(problem, wall_clock=run.caller.clock)

    def make_plan(problem: Problem) -> Plan:
        """Plans as the batch will be planned: jobs are trained together if that is better."""
        return checked_fusion(problem, work_s=PLANNING_WORK_S, seed=0, objective=terms.objective).fused_plan

    unfit = {name: faults[name] for name in due if name in faults}
    waited = run.left_by_earlier("waited")
    wanted = [
        DueModel(
            model=name,
            variants=tuple(job.name for job in check.model.variants if job.name not in faults),
            priority=check.model.priority,
            waited=waited.get(name, 0),
        )
        for name, check in due.items()
        if name not in unfit
    ]
    choice = choose(wanted, limits, problem_of=problem_of, make_plan=make_plan)
    known = SelectedModels(left=choice.left, unfit=unfit, num_trials=profiled.num_trials, profiling_s=profiling_s)
    if choice.plan is None:
        return known
    problem = problem_of(choice.jobs)
    return replace(
        known,
        batch=_batch(run, [jobs[name] for name in choice.jobs], _due_in_time(terms, limits, choice.jobs)),
        plan=_figures(
            choice,
            choice.plan,
            groups_of(choice.plan, problem),
            IN_MONEY if has_prices(problem) else limits.unit,
        ),
        gains=plan_sentences(choice.plan, problem, device=context.cluster.device_kind()),
        svg=render_svg(choice.plan, problem),
    )


def _trainable_jobs(run: RetrainingRun, check: InspectedModel) -> Iterator[Job]:
    """Yields the model's job and those of its sweep, each based on a version of the champion, as an alias may move."""
    model, champion = check.model, check.serving.champion
    for job in model.trained_jobs:
        if model.warm_start and champion is not None:
            job = replace(job, base=f"models:/{model.registered_name}/{version_of(_larger(run, model, champion))}")
        yield job


def _with_bases(run: RetrainingRun, jobs: Mapping[str, Job]) -> tuple[list[Job], dict[str, Path], dict[str, str]]:
    """Returns the jobs with the folders of the models that they name, as the batch will have them, and these folders.

    Also returns, by name, why other jobs cannot be trained: a model that they name does not exist or does not fit.
    """
    based, weights, faults = list[Job](), dict[str, Path](), dict[str, str]()
    for name in jobs:
        names = [name]
        for each in names:  # the models that other jobs of the run make are looked at with these
            names += [parent for parent in jobs[each].models if parent in jobs and parent not in names]
        jobs_of_name = tuple(jobs[each] for each in names)
        batch = Batch(name=run.production.name, jobs=jobs_of_name, folder=run.production.folder, text="")
        try:
            batch, folders = with_models(batch, run.ledger, None, settings.home())
        except InputError as error:
            faults[name] = "; ".join(map(str, error.faults))
        else:
            based.append(batch.jobs[0])
            weights |= folders
    return based, weights, faults


def _larger(run: RetrainingRun, model: ProductionModel, champion: ModelRecord) -> ModelRecord:
    """Returns the version in whose place a smaller child serves, which cannot be trained on; else the champion."""
    if champion.kind not in SMALLER or model.job.adaptation is not None:
        return champion
    known = {each.model_id: each for each in run.ledger.models()}
    larger = champion
    while larger.kind in SMALLER and (above := [known[id] for id in larger.parents if id in known]):
        larger = above[0]
    return larger if larger.registered_name == model.registered_name else champion


def _terms(run: RetrainingRun, limits: RunLimits) -> PlanningTerms:
    """Returns the terms of plans, with the features of the file and of the pool that the run belongs to."""
    own = PlanningTerms(
        objective=run.production.objective,
        price_per_device_hour=limits.price_per_device_hour,
        features=terms_features(run.production.planning()),
    )
    if (address := settings.checked_pool()) is None:
        return own
    with closing(Database(address.database)) as database:
        return with_features_of_pool(own, database)


def _due_in_time(terms: PlanningTerms, limits: RunLimits, names: Sequence[str]) -> PlanningTerms:
    """Returns the terms with the deadline of the run for these jobs."""
    return replace(terms, deadlines_s={} if limits.left_s is None else dict.fromkeys(names, limits.left_s))


def _batch(run: RetrainingRun, jobs: Sequence[Job], terms: PlanningTerms) -> Batch:
    """Returns the run's batch. Its name, that of the production file, keeps the registered names stable."""
    batch = Batch.of(
        name=run.production.name,
        jobs=jobs,
        objective=terms.objective,
        devices=run.production.devices,
        folder=run.production.folder,
        deadlines_s=terms.deadlines_s,
        price_per_device_hour=terms.price_per_device_hour,
        **run.production.batch_keys,
    )
    return replace(batch, retraining=run.production.name)


def _figures(choice: RunSelection, plan: Plan, groups: Mapping[str, Collection[str]], unit: str) -> dict[str, Any]:
    return {
        "makespan_s": plan.makespan_s,
        "lower_bound_s": plan.best_bound_s,
        "gap": plan.gap,
        "cost": choice.cost,
        "unit": unit,
        "num_jobs": len(choice.jobs),
        "num_groups": len(groups),
        "num_fused": sum(1 + len(members) for members in groups.values()),
    }
