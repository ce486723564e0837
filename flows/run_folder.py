"""The folder of one run of a batch: made, kept to one process, found again; and what the run needs for good."""

from __future__ import annotations

import datetime
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.model_lineage import LedgerError
from ringmaster.model_lineage.ledger import Ledger
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parents import unfit_parents
from ringmaster.tasks.batch.references import is_folder
from ringmaster.tasks.execution.journal import Journal
from ringmaster.techniques.engine.places import place_of
from ringmaster.techniques.values import digest


def fresh_folder(batch: Batch, home: Path) -> Path:
    """A new folder for a run of the batch, named after the time."""
    return stamped_folder(home / "batches" / batch.name)


def stamped_folder(parent: Path) -> Path:
    """A new folder in `parent`, named after the time."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = parent / stamp
    number = 1
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()
        except FileExistsError:  # started in the same second
            number += 1
            folder = folder.with_name(f"{stamp}-{number}")
        else:
            return folder


@contextmanager
def alone_in(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Keeps a second process out of a run. Raises InputError where one is in it, unless it `waits` for its end."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(
                [f"the run in {folder} is going on in another process. To fix: wait for its end"]
            ) from None
        yield


STARTING = "starting"
"""A file in the folder of a batch's runs: a run is being started, and has no folder of its own yet. Where it is there
later on, that run was killed before it began."""


def note_start(batch: Batch, home: Path) -> None:
    """Writes down that a run of the batch is being started; `begun` takes it back."""
    folder = home / "batches" / batch.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STARTING).touch()


def begun(batch: Batch, home: Path) -> None:
    """A run of the batch has begun: from now on it can be resumed by what its journal says."""
    (home / "batches" / batch.name / STARTING).unlink(missing_ok=True)


def was_being_started(batch: Batch, home: Path) -> bool:
    """Whether the last run of the batch was killed before it began."""
    return (home / "batches" / batch.name / STARTING).exists()


def folder_to_resume(batch: Batch, home: Path) -> Path | None:
    """The folder of the newest run of the batch, which must not be done and must be of the same file.

    None where there is nothing to resume: no run has begun, or the last one was killed before it did.
    """
    folders = sorted(path.parent for path in (home / "batches" / batch.name).glob("*/journal.db"))
    while folders:
        journal = Journal.of_file(folders[-1] / "journal.db")
        try:
            then = journal.get("digest")
            is_done = journal.get("status") == "done" and all("model_uri" in r.details for r in journal.jobs().values())
        finally:
            journal.close()
        if then is not None:
            break
        folders.pop()  # it was killed before it had written down what it is to do
    if not folders or (is_done and was_being_started(batch, home)):
        return None
    if then != digest(batch.to_json()):
        raise InputError(
            [
                f"the batch file has changed since the run in {folders[-1]}, so it cannot be resumed. "
                "To fix: undo the change, or leave out --resume to start afresh"
            ]
        )
    if is_done:
        raise InputError([f"the last run of batch {batch.name!r} is done. To fix: leave out --resume to run it again"])
    return folders[-1]


def checkpoint_root_of(journal: Journal, *, resume: bool) -> str | None:
    """Where the run's checkpoints go: for good, so that a run that is resumed finds them.

    Raises InputError where the library for its protocol is not installed.
    """
    root: str | None = journal.get("checkpoint_root") if resume else settings.checkpoint_root()
    try:
        place_of(root or "")
    except ValueError as error:
        raise InputError([f"RINGMASTER_CHECKPOINTS: {error}"]) from error
    journal.put("checkpoint_root", root)
    return root


def base_weights(batch: Batch, ledger: Ledger, journal: Journal, home: Path) -> dict[str, Path]:
    """Folders of the models that jobs come from and that are not jobs of the batch: fetched from the registry, or as
    they were named. Of bases by the job, of others by the name that they are given.

    An alias is followed once a run: the version is kept in the journal, and taken again where the run is resumed.
    Raises InputError with every model that is not there, and every one that an adaptation cannot take.
    """
    names = {job.name for job in batch.jobs}
    folders: dict[str, Path] = {}
    missing: dict[str, str] = {}  # by model: all trials of a sweep may name the same one, which is told once
    for job in batch.jobs:
        for parent in job.parents:
            is_base = parent == job.base
            key = job.name if is_base else parent
            if parent in names or key in folders or parent in missing:
                continue
            if is_folder(parent):
                folders[key] = Path(parent)
                continue
            try:
                uri = journal.get(f"base:{key}") or ledger.resolve_model(parent).uri
                folders[key] = ledger.download_model(uri, home / "cache" / "models")
                journal.put(f"base:{key}", uri)
            except LedgerError as error:
                missing[parent] = f"{_who_names(parent, batch)}: {'base' if is_base else 'parent'} {parent}: {error}"
    faults = [*missing.values(), *unfit_parents(batch.jobs, folders)]
    if faults:
        raise InputError(faults)
    return folders


def _who_names(parent: str, batch: Batch) -> str:
    """The jobs that come from a model, in few words."""
    first, *others = [job.name for job in batch.jobs if parent in job.parents]
    return f"job {first}" + (f" and {len(others)} more" if others else "")
