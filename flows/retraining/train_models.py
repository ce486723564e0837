"""Training of a retraining run's batch, new or resumed; the best job of a sweep becomes its model's newest version."""

import math
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.errors import InputError, RunInterrupted, UntrainableJobs
from ringmaster.flows import settings
from ringmaster.flows.batch.flow_runs import result_of
from ringmaster.flows.batch.result import BatchResult
from ringmaster.flows.batch.run_folder import folder_to_resume
from ringmaster.flows.pool.follower import newest_run
from ringmaster.flows.retraining.retraining_run import RetrainingRun
from ringmaster.flows.retraining.select_models import InspectedModel, SelectedModels, trained_of
from ringmaster.flows.train_batch import train_batch
from ringmaster.model_lineage import ModelRecord
from ringmaster.model_lineage.ledger.families import unless_lost
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.retraining.drift import TrainingRecord, input_features, references_of
from ringmaster.tasks.retraining.promotion import TRAINED
from ringmaster.tasks.retraining.report import cost_of_batch
from ringmaster.tasks.retraining.runs import RetrainingStatus
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.metric import ranked


def train_models(
    run: RetrainingRun, checks: Mapping[str, InspectedModel], chosen: SelectedModels, *, seed: int
) -> BatchResult | None:
    """Trains the selected batch; returns None if there is nothing to train, or an earlier process has trained it.

    Each model's MLflow run stores the data that it was trained on, for later retraining runs.
    """
    if (value := run.content.get("result")) is not None:
        return from_json(BatchResult, value)
    if chosen.batch is None or run.content.get("is_trained"):
        return None
    result, (batch, is_resumed) = None, _left_to_train(run, checks, chosen.batch)
    while batch is not None and result is None:
        run.save(training=batch.to_json())
        # A failed job is the failure of its model alone: the outcome of the others does not depend on it.
        try:
            result = result_of(
                partial(train_batch, batch, name=batch.name, resume=is_resumed, seed=seed, caller=run.caller)
            )
        except InputError as error:  # nothing was begun
            refused = error.__cause__.faults if isinstance(error.__cause__, UntrainableJobs) else {}
            refused = refused or {job.name: str(error) for job in batch.jobs}
            run.save(refused={**run.content.get("refused", {}), **refused})
            batch, is_resumed = _without(batch, refused.keys()), False
    if result is None:
        run.save(is_trained=True)
        return None
    if result.status != "interrupted":
        for check in checks.values():
            _finish_training(run, check, _recorded(run, check, result))
        run.save(result=result.to_json())
    return result


def train_children(run: RetrainingRun, batch: Batch, *, seed: int) -> None:
    """Trains smaller children of a model's candidate, or resumes that. Its cost belongs to the run's.

    Raises InputError if the run's deadline has passed, and nothing was begun.
    """
    batch = replace(batch, devices=run.production.devices, folder=run.production.folder)
    can_resume = can_go_on(batch)
    if run.is_late and not can_resume:
        raise InputError(["no smaller model is trained, as the deadline of the run has passed"])
    train = partial(train_batch, batch, name=batch.name, resume=can_resume, seed=seed, caller=run.caller)
    result = result_of(train)
    if result.status == RetrainingStatus.INTERRUPTED:
        raise RunInterrupted("the retraining run was interrupted; the same command resumes it", result=result)
    price = run.production.entry.night.price_per_device_hour
    cost = cost_of_batch(result.to_json(), price_per_device_hour=price)
    run.save(children_cost=run.content.get("children_cost", 0.0) + cost)


def row_of(name: str, result: BatchResult) -> Mapping[str, Any] | None:
    """Returns the row of a job in a result; None if it was not trained."""
    return next((job for job in result.jobs if job["name"] == name), None)


def _left_to_train(run: RetrainingRun, checks: Mapping[str, InspectedModel], batch: Batch) -> tuple[Batch | None, bool]:
    """Returns the batch without the models that were trained before an interruption, and whether it is resumed.

    Models whose champion was deleted since the run began are left out too, as they cannot be trained any more.
    """
    if (begun := run.content.get("training")) is not None:
        batch = Batch.from_json(begun)
        if can_go_on(batch):
            return batch, True
        now, made = run.standings(), set[str]()
        for check in checks.values():
            newest = now[check.model.registered_name].latest
            if newest is not None and check.has_made(newest):
                _finish_training(run, check, _made_with(run, check, newest))
                made |= {job.name for job in check.model.trained_jobs}
        if (left := _without(batch, made)) is None:
            return None, False
        batch = left
    bases = {job.name: job.base for job in batch.jobs if job.base is not None}
    gone = {name for name, base in bases.items() if unless_lost(run.ledger.resolve_model, base) is None}
    if gone:
        run.caller.view.notice(f"deleted from the registry meanwhile: {', '.join(sorted(gone))}")
        run.save(gone=sorted(gone))
    return _without(batch, gone), False


def can_go_on(batch: Batch) -> bool:
    """Returns whether an interrupted run of a batch can be resumed."""
    address, home = settings.checked_pool(), settings.home()
    try:
        if address is None:
            return folder_to_resume(batch, home) is not None
        with closing(Database(address.database)) as database:
            return newest_run(batch, database, home) is not None
    except InputError:  # it is done
        return False


def _without(batch: Batch, names: Collection[str]) -> Batch | None:
    """Returns the batch without some jobs; None if no job is left."""
    jobs = tuple(job for job in batch.jobs if job.name not in names)
    deadlines_s = {name: s for name, s in batch.deadlines_s.items() if name not in names}
    return replace(batch, jobs=jobs, deadlines_s=deadlines_s) if jobs else None


def _finish_training(run: RetrainingRun, check: InspectedModel, made: Mapping[str, ModelRecord]) -> None:
    """Completes the training of a model's jobs; it is idempotent. made: the models by job name."""
    for record in made.values():
        _keep_what_was_read(run, check, record)
    if check.model.variants:
        _choose_of_sweep(run, check, made)


def _keep_what_was_read(run: RetrainingRun, check: InspectedModel, record: ModelRecord) -> None:
    """Stores with a model the data that it was trained on, as it was at the start of the run."""
    if check.data is None or trained_of(run, record) is not None:
        return
    kept = TrainingRecord(
        run_date=run.date,
        at_s=run.record.began_s,
        digest=check.data["digest"],
        num_samples=check.data["num_samples"],
        files=check.files,
        inputs=references_of(input_features(Path(check.data["folder"]))),
    )
    keep_trained(run, record, kept)


def keep_trained(run: RetrainingRun, record: ModelRecord, kept: TrainingRecord) -> None:
    """Stores the facts about a model's training with its MLflow run."""
    if record.run_id is not None:
        run.ledger.write_json(record.run_id, TRAINED, to_json(kept))


def _recorded(run: RetrainingRun, check: InspectedModel, result: BatchResult) -> dict[str, ModelRecord]:
    """Returns the models that a model's jobs made, by job name."""
    rows = {job.name: row_of(job.name, result) for job in check.model.trained_jobs}
    return {
        name: run.ledger.resolve_model(row["model_uri"])
        for name, row in rows.items()
        if row is not None and row["status"] == JobStatus.DONE and row["model_uri"]
    }


def _made_with(run: RetrainingRun, check: InspectedModel, newest: ModelRecord) -> dict[str, ModelRecord]:
    """Returns the same for models that were trained before a restart, by job name."""
    batch_run_id = newest.origin.batch_run_id
    of_batch = {m.origin.job: m for m in run.ledger.models() if m.origin.batch_run_id == batch_run_id}
    return {job.name: of_batch[job.name] for job in check.model.trained_jobs if job.name in of_batch}


def _choose_of_sweep(run: RetrainingRun, check: InspectedModel, made: Mapping[str, ModelRecord]) -> None:
    """Makes the best job of a sweep, by its final metric, the newest version of its model."""
    metric = check.model.metric
    values = {name: run.ledger.metrics_of(record).get(metric, math.nan) for name, record in made.items()}
    best = next(iter(ranked(values, metric=metric)), check.model.name)
    if best != check.model.name and math.isfinite(values[best]):
        text = f"The best of a sweep of {len(made)}: {best}"
        run.ledger.add_version(made[best], check.model.registered_name, text=text)
