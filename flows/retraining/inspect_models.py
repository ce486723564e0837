"""Inspection of the models before training: freezes their current data, and decides which models are due."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.errors import BatchFileError, LedgerError
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.retraining.retraining_run import RetrainingRun
from ringmaster.model_lineage import ModelRecord
from ringmaster.tasks.evaluation.model_assertions import Log, check, importable
from ringmaster.tasks.evaluation.suite import load_suite
from ringmaster.tasks.profiling.preflight import preflight_jobs
from ringmaster.tasks.retraining import drift
from ringmaster.tasks.retraining.drift import Drift, TrainingRecord, drifts_of
from ringmaster.tasks.retraining.production import ObservedData, ProductionModel, with_tokenizer_of
from ringmaster.tasks.retraining.promotion import ServingVersions, training_digest, version_of
from ringmaster.tasks.retraining.runs import freeze
from ringmaster.tasks.retraining.selection import DueDecision, ModelObservations, due
from ringmaster.techniques import Job

TRAINED = "retraining/trained.json"
"""The artifact of a model's MLflow run with the data that a retraining run trained it on."""


@dataclass(frozen=True, kw_only=True)
class InspectedModel:
    """The result of inspecting a model before training.

    model: the model, with the tokenizer of its champion and the copied files of this run.
    serving: its versions in the registry.
    champion_dir: the champion's files.
    data: the JSON form of the prepared data.
    files: the data files, as (name, stamp).
    due: whether the model is due; None if the data could not be read.
    fault: why the data could not be read.
    newest_before: its newest version at the inspection. None if there was none, or if the run was begun by an earlier
        release, which did not store it.
    """

    model: ProductionModel
    serving: ServingVersions
    champion_dir: Path | None = None
    data: Mapping[str, Any] | None = None
    files: tuple[tuple[str, str], ...] = ()
    due: DueDecision | None = None
    fault: str = ""
    newest_before: int | None = None

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
        check = InspectedModel(model=model, serving=where[model.registered_name])
        try:
            result[model.name] = _frozen(run, check)
        except (ValueError, OSError, LedgerError) as error:
            if isinstance(error, LedgerError) and error.may_pass:
                raise  # nothing is wrong with the model: the run resumes when it is called again
            result[model.name] = replace(check, fault=str(error))
    models = [check.model for check in result.values() if not check.fault]
    preflights, faults = ({}, {}) if not models else _preflighted(run, models)
    data = {name: preflight.data for name, preflight in preflights.items()}
    return {name: check if check.fault else _decided(run, check, data, faults) for name, check in result.items()}


def _frozen(run: RetrainingRun, check: InspectedModel) -> InspectedModel:
    """Returns the check with copies of the model's files, and the tokenizer of its champion."""
    champion = check.serving.champion
    folder = None if champion is None else run.download(champion)
    copies = run.folder / "data"

    def of_this_run(job: Job) -> Job:
        return replace(job, data=freeze(job.data, run_date=run.date, window_days=None, folder=copies).data)

    model = check.model
    frozen = freeze(model.job.data, run_date=run.date, window_days=model.window_days, folder=copies)
    own = replace(model.job, data=frozen.data)
    model = replace(
        model,
        job=own,
        variants=tuple(replace(job, data=own.data) for job in model.variants),
        compare_on=None if model.compare_on is None else of_this_run(model.compare_on),
        watched=replace(
            model.watched, inputs=None if model.watched.inputs is None else of_this_run(model.watched.inputs)
        ),
    )
    return replace(check, model=with_tokenizer_of(folder, model), champion_dir=folder, files=frozen.files)


def _preflighted(run: RetrainingRun, models: Sequence[ProductionModel]) -> tuple[dict[str, Any], dict[str, str]]:
    node_context = run.node_context
    return preflight_jobs(
        [job for model in models for job in model.jobs],
        environment=node_context.environment,
        cluster=node_context.cluster,
        notice=current_view.get().notice,
        evaluated=[job.name for model in models for job in model.jobs if job is not model.job],
    )


def _decided(
    run: RetrainingRun, check: InspectedModel, data: Mapping[str, Any], faults: Mapping[str, str]
) -> InspectedModel:
    """Returns the check with the decision whether the model is due."""
    model, serving = check.model, check.serving
    if model.name in faults:
        return replace(check, fault=faults[model.name])
    own, missing = data[model.name], list[str]()
    newest, champion = serving.latest, serving.champion
    seen = ModelObservations(
        run_date=run.date,
        digest=own["digest"],
        num_samples=own["num_samples"],
        trained=None if newest is None or model.rules.max_age_days is None else _run_of_training(run, newest),
        drifts=tuple(_drifts(run, model, champion, data, faults, missing)),
        failed_assertions=tuple(_failed(model.watched, missing)),
        missing=tuple(missing),
        only_older=model.window_days is not None and _only_lost_files(run, check),
        had_champion=model.name in run.left_by_earlier("champions"),
        is_forced=model.name in run.forced,
    )
    return replace(check, data=own, due=due(serving, seen, model.rules))


def trained_of(run: RetrainingRun, model: ModelRecord) -> TrainingRecord | None:
    """Returns what a retraining run stored about a model's training; None if the model was trained otherwise."""
    if model.run_id is None:
        return None
    try:
        return from_json(TrainingRecord, json.loads(run.ledger.read_text(model.run_id, TRAINED)))
    except LedgerError as error:
        if error.may_pass:
            raise
        return None


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
    return run.production.hours.run_date_of(run.ledger.client.get_run(model.run_id).info.start_time / 1000)


def _drifts(
    run: RetrainingRun,
    model: ProductionModel,
    champion: ModelRecord | None,
    data: Mapping[str, Any],
    faults: Mapping[str, str],
    missing: list[str],
) -> Iterator[Drift]:
    """Yields the drift of inputs and of predictions, relative to the champion's training data."""
    if model.rules.drift is None or champion is None:
        return
    kept = trained_of(run, champion)
    if kept is None:
        missing.append("drift cannot be measured: no retraining run has trained its champion")
        return
    watched = model.watched
    name = model.name if watched.inputs is None else watched.inputs.name
    if name in faults:
        missing.append(f"the inputs cannot be read: {faults[name]}")
    else:
        yield from drifts_of(kept.inputs, drift.input_features(Path(data[name]["folder"])), model.rules.drift)
    if watched.predictions is None:
        return
    if not kept.predictions:
        missing.append("drift of predictions cannot be measured: none were stored for its champion")
        return
    try:
        logged = drift.logged_features(Log(watched.predictions))
    except ValueError as error:
        missing.append(str(error))
        return
    yield from drifts_of(kept.predictions, logged, model.rules.drift)


def _failed(watched: ObservedData, missing: list[str]) -> Iterator[str]:
    """Yields the assertions that fail on what was logged."""
    if watched.suite is None or watched.asserted is None:
        return
    try:
        suite = load_suite(watched.suite)
        with importable(watched.suite.parent):
            results = check(suite.assertions, Log(watched.asserted))
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
        ),
        serving=serving,
        champion_dir=None if serving.champion is None or fields["fault"] else run.download(serving.champion),
        data=fields["data"],
        files=tuple((name, stamp) for name, stamp in fields["files"]),
        due=None if fields["due"] is None else from_json(DueDecision, fields["due"]),
        fault=fields["fault"],
        newest_before=fields.get("newest"),
    )
