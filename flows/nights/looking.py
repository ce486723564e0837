"""What a night sees of its models before anything is trained: their data as it is now, and whether they are due."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.flows.nights.night import Night
from ringmaster.flows.views import current_view
from ringmaster.model_lineage import LedgerError, ModelRecord
from ringmaster.tasks.batch import BatchFileError
from ringmaster.tasks.evaluation.assertions import check, importable
from ringmaster.tasks.evaluation.logs import Log
from ringmaster.tasks.evaluation.suite import load_suite
from ringmaster.tasks.profiling.stage import survey_jobs
from ringmaster.tasks.promotion.stage import Standing, training_digest, version_of
from ringmaster.tasks.retraining import observing
from ringmaster.tasks.retraining.drift import Drift, drifts_of
from ringmaster.tasks.retraining.due import Due, Seen, due
from ringmaster.tasks.retraining.frozen import freeze
from ringmaster.tasks.retraining.observing import Trained
from ringmaster.tasks.retraining.production import ProductionModel, Watched, with_tokenizer_of
from ringmaster.techniques import Job
from ringmaster.techniques.values import from_json, to_json

TRAINED = "retraining/trained.json"
"""The artifact of a model's run that says what a night has trained it on."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found of a model before anything was trained.

    model: with the tokenizer of its champion and the files of this night. champion_dir: the champion's files. data: the
    JSON form of the prepared data; files: of it, as they were copied. due: None where the data could not be read, which
    `fault` tells. newest_before: its newest version when the night looked; None where there was none, or where a former
    release, which did not keep it, has begun the night.
    """

    model: ProductionModel
    standing: Standing
    champion_dir: Path | None = None
    data: Mapping[str, Any] | None = None
    files: tuple[tuple[str, str], ...] = ()
    due: Due | None = None
    fault: str = ""
    newest_before: int | None = None

    def has_made(self, newest: ModelRecord | None) -> bool:
        """Whether this night has trained the newest version of now: on its data, and after it had looked.

        The data alone does not tell: a model that is due by its age, or by force, has a version of the same data.
        """
        if newest is None or self.data is None or training_digest(newest) != self.data["digest"]:
            return False
        return self.newest_before is None or version_of(newest) > self.newest_before


def look(night: Night) -> dict[str, Checked]:
    """What is known of each model; what an earlier process of this night saw is what counts."""
    where = night.standings()
    seen: Mapping[str, Any] = night.step(
        "looked", lambda: {name: _plain(c) for name, c in _fresh(night, where).items()}
    )
    models = {model.name: model for model in night.production.models}
    return {name: _read(night, models[name], where, said) for name, said in seen.items() if name in models}


def _fresh(night: Night, where: Mapping[str, Standing]) -> dict[str, Checked]:
    found = {}
    for model in night.production.models:
        check = Checked(model=model, standing=where[model.registered_name])
        try:
            found[model.name] = _frozen(night, check)
        except (ValueError, OSError, LedgerError) as error:
            if isinstance(error, LedgerError) and error.may_pass:
                raise  # nothing is wrong with the model: the night goes on when it is called again
            found[model.name] = replace(check, fault=str(error))
    jobs = [job for check in found.values() if not check.fault for job in check.model.jobs]
    surveys, faults = ({}, {}) if not jobs else _surveyed(night, jobs)
    data = {name: survey.data for name, survey in surveys.items()}
    return {name: check if check.fault else _decided(night, check, data, faults) for name, check in found.items()}


def _frozen(night: Night, check: Checked) -> Checked:
    """With copies of its files, and the tokenizer of its champion."""
    champion = check.standing.champion
    folder = None if champion is None else night.download(champion)
    copies = night.folder / "data"

    def of_tonight(job: Job) -> Job:
        return replace(job, data=freeze(job.data, night=night.date, window_days=None, folder=copies).data)

    model = check.model
    frozen = freeze(model.job.data, night=night.date, window_days=model.window_days, folder=copies)
    own = replace(model.job, data=frozen.data)
    model = replace(
        model,
        job=own,
        variants=tuple(replace(job, data=own.data) for job in model.variants),
        compare_on=None if model.compare_on is None else of_tonight(model.compare_on),
        watched=replace(
            model.watched, inputs=None if model.watched.inputs is None else of_tonight(model.watched.inputs)
        ),
    )
    return replace(check, model=with_tokenizer_of(folder, model), champion_dir=folder, files=frozen.files)


def _surveyed(night: Night, jobs: list[Job]) -> tuple[dict[str, Any], dict[str, str]]:
    bench = night.bench
    return survey_jobs(jobs, site=bench.site, cluster=bench.cluster, notice=current_view.get().notice)


def _decided(night: Night, check: Checked, data: Mapping[str, Any], faults: Mapping[str, str]) -> Checked:
    """Whether a model is due."""
    model, standing = check.model, check.standing
    if model.name in faults:
        return replace(check, fault=faults[model.name])
    own, missing = data[model.name], list[str]()
    newest, champion = standing.latest, standing.champion
    seen = Seen(
        night=night.date,
        digest=own["digest"],
        num_samples=own["num_samples"],
        trained=None if newest is None or model.rules.max_age_days is None else _night_of_training(night, newest),
        drifts=tuple(_drifts(night, model, champion, data, faults, missing)),
        failed_assertions=tuple(_failed(model.watched, missing)),
        missing=tuple(missing),
        only_older=model.window_days is not None and _only_lost_files(night, check),
        had_champion=model.name in night.left_by_earlier("champions"),
        is_forced=model.name in night.forced,
    )
    return replace(check, data=own, due=due(standing, seen, model.rules))


def trained_of(night: Night, model: ModelRecord) -> Trained | None:
    """What a night has kept of a model's training; None where it was trained otherwise."""
    if model.run_id is None:
        return None
    try:
        return Trained.from_json(json.loads(night.ledger.read_text(model.run_id, TRAINED)))
    except LedgerError as error:
        if error.may_pass:
            raise
        return None


def _only_lost_files(night: Night, check: Checked) -> bool:
    """Whether every file of tonight was trained on already: by the champion, or by the newest version."""
    known = [model for model in (check.standing.champion, check.standing.latest) if model is not None]
    kept = [trained for model in known if (trained := trained_of(night, model)) is not None]
    read = {file for trained in kept for file in trained.files}
    return bool(check.files) and read.issuperset(check.files)


def _night_of_training(night: Night, model: ModelRecord) -> str | None:
    """The date of the night that trained a version; of one that was trained otherwise, that in which its run began."""
    if (kept := trained_of(night, model)) is not None:
        return kept.night
    if model.run_id is None:
        return None
    start_ms = night.ledger.client.get_run(model.run_id).info.start_time
    return night.production.hours.night_of(start_ms / 1000)


def _drifts(
    night: Night,
    model: ProductionModel,
    champion: ModelRecord | None,
    data: Mapping[str, Any],
    faults: Mapping[str, str],
    missing: list[str],
) -> Iterator[Drift]:
    """The drift of inputs and of predictions, against what the champion was trained on."""
    if model.rules.drift is None or champion is None:
        return
    kept = trained_of(night, champion)
    if kept is None:
        missing.append("drift cannot be told: no night has trained its champion")
        return
    watched = model.watched
    name = model.name if watched.inputs is None else watched.inputs.name
    if name in faults:
        missing.append(f"the inputs cannot be read: {faults[name]}")
    else:
        yield from drifts_of(kept.inputs, observing.input_features(Path(data[name]["folder"])), model.rules.drift)
    if watched.predictions is None:
        return
    if not kept.predictions:
        missing.append("drift of predictions cannot be told: none were kept of its champion")
        return
    try:
        logged = observing.logged_features(Log(watched.predictions))
    except ValueError as error:
        missing.append(str(error))
        return
    yield from drifts_of(kept.predictions, logged, model.rules.drift)


def _failed(watched: Watched, missing: list[str]) -> Iterator[str]:
    """The assertions that do not hold on what was logged."""
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
            said = result.why or f"{result.num_failures} of {result.num_rows} rows fail"
            yield f"assertion {result.assertion}: {said}"


def _plain(check: Checked) -> dict[str, Any]:
    """What is saved of a check."""
    model = check.model
    return {
        "job": to_json(model.job),
        "variants": to_json(model.variants),
        "compare_on": to_json(model.compare_on),
        "champion": None if check.standing.champion is None else version_of(check.standing.champion),
        "newest": None if check.standing.latest is None else version_of(check.standing.latest),
        "data": to_json(check.data),
        "files": to_json(check.files),
        "copies": [path for job in model.jobs for path in (job.data.path, job.data.held_out_path) if path is not None],
        "due": to_json(check.due),
        "fault": check.fault,
    }


def _read(night: Night, model: ProductionModel, where: Mapping[str, Standing], said: Mapping[str, Any]) -> Checked:
    """A check as it was saved; the champion that it is compared with is the one of now."""
    standing = where[model.registered_name]
    return Checked(
        model=replace(
            model,
            job=from_json(Job, said["job"]),
            variants=tuple(from_json(Job, job) for job in said["variants"]),
            compare_on=None if said["compare_on"] is None else from_json(Job, said["compare_on"]),
        ),
        standing=standing,
        champion_dir=None if standing.champion is None or said["fault"] else night.download(standing.champion),
        data=said["data"],
        files=tuple((name, stamp) for name, stamp in said["files"]),
        due=None if said["due"] is None else from_json(Due, said["due"]),
        fault=said["fault"],
        newest_before=said.get("newest"),
    )
