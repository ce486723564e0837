"""The request for a clone, as a person makes it: its price is shown first."""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from ringmaster.errors import InputError, raise_faults
from ringmaster.features.clones.execute import CLONE
from ringmaster.flows.pool.batch_requests import ControllerAnswer, ask_about, meant
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.references import NAME_REMEDY
from ringmaster.tasks.control.job_changes import change_faults
from ringmaster.tasks.execution.job_table import added_jobs
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import BATCH
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.job_features import is_name


def clone_job(
    database: Database,
    *,
    batch: str,
    job: str,
    settings_of_clone: Mapping[str, Any],
    name: str = "",
    is_warm: bool = False,
    at_step: int | None = None,
    is_dry: bool = False,
    accept: Callable[[ControllerAnswer], None],
) -> ControllerAnswer:
    """Requests the price of a clone of a job and, unless `is_dry`, the clone; see `CLONE`.

    name: of the clone; by default the job's with a number.
    accept: is called with the price; may raise.

    Raises InputError with all faults.
    """
    keys = [*meant(database, batch=batch, jobs=[job])]
    if len(keys) > 1:
        raise InputError([f"several batches have a job {job}: {', '.join(keys)}. To fix: give its id"])
    (key,) = keys
    journal = Journal(database, batch=key)
    known = journal.jobs()
    name = name or next(name for n in count(1) if (name := f"{job}-clone{n}") not in known)
    faults = [] if is_name(name) else [f"{name!r} is not a valid name. {NAME_REMEDY}"]
    if at_step is not None and not is_warm:
        faults.append("a step is for a warm clone, which continues from a checkpoint. To fix: add --warm")
    file = journal.get(BATCH)  # without the batches that are handed over by a program
    jobs = [*(Batch.from_json(file).jobs if file else ()), *added_jobs(known)]
    faults += [fault for each in jobs if each.name == job for fault in change_faults(each, settings_of_clone)]
    raise_faults(faults)
    more: dict[str, Any] = {"settings": dict(settings_of_clone), "name": name, "is_warm": is_warm, "at_step": at_step}
    (answer,) = ask_about(database, CLONE, batch=key or batch, jobs=[job], is_dry=True, **more)
    accept(answer)
    if not is_dry and answer.is_done:
        (answer,) = ask_about(database, CLONE, batch=key or batch, jobs=[job], **more)
    return answer
