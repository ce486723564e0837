"""A night's batch: trained, or gone on with; the best of each sweep becomes its model's newest version."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.flows.flow_runs import result_of
from ringmaster.flows.nights.choosing import Chosen
from ringmaster.flows.nights.looking import TRAINED, Checked, trained_of
from ringmaster.flows.nights.night import Night
from ringmaster.flows.pool.run import newest_run
from ringmaster.flows.result import BatchResult
from ringmaster.flows.run_folder import folder_to_resume
from ringmaster.flows.train_batch import train_batch
from ringmaster.flows.views import current_view
from ringmaster.model_lineage import LedgerError, ModelRecord
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.evaluation.compare import ranked
from ringmaster.tasks.execution.journal import DONE
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.retraining.observing import Trained, input_features, references_of
from ringmaster.techniques import Job
from ringmaster.techniques.values import from_json


def train(night: Night, checks: Mapping[str, Checked], chosen: Chosen, *, seed: int) -> BatchResult | None:
    """Trains what was chosen; None where there is nothing to train, or an earlier process of this night has trained it.

    Each model's run keeps what it was trained on, for later nights.
    """
    if (said := night.content.get("result")) is not None:
        return from_json(BatchResult, said)
    if chosen.batch is None or night.content.get("is_trained"):
        return None
    batch, is_resumed = _left_to_train(night, checks, chosen.batch)
    if batch is None:
        night.save(is_trained=True)
        return None
    night.save(training=batch.to_json())
    # A job that fails is its model's failure; what becomes of the others does not depend on it.
    result = result_of(train_batch, batch.to_json(), name=batch.name, resume=is_resumed, seed=seed)
    if result.status != "interrupted":
        for check in checks.values():
            _finish_training(night, check, _recorded(night, check, result))
        night.save(result=result.to_json())
    return result


def row_of(name: str, result: BatchResult) -> Mapping[str, Any] | None:
    """What became of a job; None where it was not trained."""
    return next((job for job in result.jobs if job["name"] == name), None)


def _left_to_train(night: Night, checks: Mapping[str, Checked], batch: Batch) -> tuple[Batch | None, bool]:
    """The batch, and whether it is gone on with; what was trained before this night was cut short is left out.

    So is what cannot be trained any more: a model whose champion was deleted since the night began.
    """
    if (begun := night.content.get("training")) is not None:
        batch = Batch.from_json(begun)
        if _can_go_on(batch):
            return batch, True
        now = night.standings()
        for check in checks.values():
            newest = now[check.model.registered_name].latest
            if newest is not None and check.has_made(newest):
                _finish_training(night, check, _made_with(night, check, newest))
                batch = _without(batch, {job.name for job in _all_jobs(check)})
    gone = {job.name for job in batch.jobs if job.base is not None and not _is_there(night, job.base)}
    if gone:
        current_view.get().notice(f"deleted from the registry meanwhile: {', '.join(sorted(gone))}")
        night.save(gone=sorted(gone))
    batch = _without(batch, gone)
    return (batch if batch.jobs else None), False


def _can_go_on(batch: Batch) -> bool:
    address, home = settings.pool(), settings.home()
    try:
        if address is None:
            return folder_to_resume(batch, home) is not None
        with closing(Database(address.database)) as database:
            return newest_run(batch, database, home) is not None
    except InputError:  # it is done
        return False


def _is_there(night: Night, uri: str) -> bool:
    try:
        night.ledger.resolve_model(uri)
    except LedgerError as error:
        if error.may_pass:
            raise
        return False
    return True


def _without(batch: Batch, names: set[str]) -> Batch:
    if not names:
        return batch
    jobs = tuple(job for job in batch.jobs if job.name not in names)
    deadlines_s = {name: s for name, s in batch.deadlines_s.items() if name not in names}
    return replace(batch, jobs=jobs, deadlines_s=deadlines_s)


def _all_jobs(check: Checked) -> list[Job]:
    return [check.model.job, *check.model.variants]


def _finish_training(night: Night, check: Checked, made: Mapping[str, ModelRecord]) -> None:
    """What is left to do once a model's jobs were trained; again, it changes nothing. made: by the jobs' names."""
    for record in made.values():
        _keep_what_was_read(night, check, record)
    if check.model.variants:
        _choose_of_sweep(night, check, made)


def _keep_what_was_read(night: Night, check: Checked, record: ModelRecord) -> None:
    """Writes beside a model what it was trained on, as the night saw it when it began."""
    if check.data is None or trained_of(night, record) is not None:
        return
    kept = Trained(
        night=night.date,
        at_s=night.record.began_s,
        digest=check.data["digest"],
        num_samples=check.data["num_samples"],
        files=check.files,
        inputs=references_of(input_features(Path(check.data["folder"]))),
    )
    keep_trained(night, record, kept)


def keep_trained(night: Night, record: ModelRecord, kept: Trained) -> None:
    """Writes what is kept of a model's training beside it."""
    if record.run_id is not None:
        night.ledger.write_json(record.run_id, TRAINED, json.loads(json.dumps(kept.to_json())))


def _recorded(night: Night, check: Checked, result: BatchResult) -> dict[str, ModelRecord]:
    """The models that a model's jobs made, by the jobs' names."""
    rows = {job.name: row_of(job.name, result) for job in _all_jobs(check)}
    return {
        name: night.ledger.resolve_model(row["model_uri"])
        for name, row in rows.items()
        if row is not None and row["status"] == DONE and row["model_uri"]
    }


def _made_with(night: Night, check: Checked, newest: ModelRecord) -> dict[str, ModelRecord]:
    """Likewise, of an earlier process of this night: the models of the batch that the newest version came of."""
    batch_run_id = newest.origin.batch_run_id
    of_batch = {m.origin.job: m for m in night.ledger.models() if m.origin.batch_run_id == batch_run_id}
    return {job.name: of_batch[job.name] for job in _all_jobs(check) if job.name in of_batch}


def _choose_of_sweep(night: Night, check: Checked, made: Mapping[str, ModelRecord]) -> None:
    """Makes the best job of a sweep, by what was measured at its end, the newest version of its model."""
    metric = check.model.metric
    values = {name: night.ledger.metrics_of(record).get(metric, math.nan) for name, record in made.items()}
    best = next(iter(ranked(values, metric=metric)), check.model.name)
    if best != check.model.name and math.isfinite(values[best]):
        text = f"The best of a sweep of {len(made)}: {best}"
        night.ledger.add_version(made[best], check.model.registered_name, text=text)
