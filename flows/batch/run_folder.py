"""The folder of a run of a batch: creation, locking, search for the one to resume; and the run's fixed inputs."""

import fcntl
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ringmaster.errors import InputError, LedgerError, RingmasterError, SignatureError, raise_faults
from ringmaster.flows import settings
from ringmaster.flows.dated_runs import in_order, runs_below
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import INDEXED
from ringmaster.model_lineage.sqlite_files import sqlite_url
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parent_rules import unfit_parents, with_base_configs, with_teachers
from ringmaster.tasks.batch.references import is_folder
from ringmaster.tasks.planning.term_features import resumed_features
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import BATCH, CHECKPOINT_ROOT, FLOW_RUNS, IS_OVER, IS_RECORDED, STATUS
from ringmaster.tasks.storage.journal import Journal, facts_of_file
from ringmaster.text import Notice


@contextmanager
def exclusive_lock(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Locks the folder of a run. Raises InputError if another process has the lock, unless `waits` is set."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(
                [f"the run in {folder} is going on in another process. To fix: wait for its end"]
            ) from None
        yield


def is_going_on(folder: Path) -> bool:
    """Returns whether a process has the lock of the folder of a run, which this process need only read."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


STARTING = "starting"
"""A file in the folder of a batch's runs: a run is starting, and has no folder of its own yet. If the file exists
later, that run was killed before it began.
"""


def mark_starting(batch: Batch, home: Path) -> None:
    """Notes that a run of the batch starts; `mark_started` deletes the note. Raises InputError on wrong settings."""
    settings.num_plain_runs()
    folder = home / "batches" / batch.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STARTING).touch()


def mark_started(batch: Batch, home: Path) -> None:
    """Notes that a run of the batch has begun: from now on its journal allows to resume it."""
    (home / "batches" / batch.name / STARTING).unlink(missing_ok=True)


def was_being_started(batch: Batch, home: Path) -> bool:
    """Returns whether the last run of the batch was killed before it began."""
    return (home / "batches" / batch.name / STARTING).exists()


def folder_to_resume(batch: Batch, home: Path) -> Path | None:
    """Returns the folder of the newest run of the batch. Raises InputError if it is done or of a changed file.

    Returns None if there is nothing to resume: no run has begun, or the last one was killed before it began.
    """
    folders = runs_below(home / "batches" / batch.name)
    while folders:
        with closing(Journal.of_file(folders[-1] / "journal.db")) as journal:
            stored = journal.get(BATCH)
            is_recorded = journal.get(IS_RECORDED, True)  # unset by earlier releases, and by a kill
            is_recorded = is_recorded and all(r.model_uri for r in journal.jobs().values())
            is_done = journal.get(STATUS) == "done" and is_recorded
        if stored is not None:
            break
        folders.pop()  # it was killed before it had written its inputs
    if not folders or (is_done and was_being_started(batch, home)):
        return None
    if not is_batch(batch, stored):
        raise InputError(
            [
                f"the batch file has changed since the run in {folders[-1]}, so it cannot be resumed. "
                "To fix: undo the change, or leave out --resume to start afresh"
            ]
        )
    if is_done:
        raise InputError([f"the last run of batch {batch.name!r} is done. To fix: leave out --resume to run it again"])
    return folders[-1]


def folder_of_flow_run(batch: Batch, home: Path, flow_runs: Sequence[str], *, notice: Notice) -> Path | None:
    """Returns the folder of the newest run of the batch that one of these flow runs has begun; None if there is none.

    So *Retry* in Prefect continues with a run. What a flow run has trained to its end before does not count where the
    flow run of the batch is another one: a flow may train the same batch again.

    flow_runs: as in `FLOW_RUNS`.
    notice: shows that this flow run has begun a run of the file before it was changed, which is left unfinished.
    """
    changed: Path | None = None
    for folder in reversed(runs_below(home / "batches" / batch.name)):
        with suppress(InputError, OSError):  # a run that cannot be read hinders no other one
            facts = facts_of_file(folder / "journal.db", FLOW_RUNS, "status", IS_OVER)
            root, own = facts.get(FLOW_RUNS, ("", ""))
            is_done = facts.get("status") == "done" and facts.get(IS_OVER)
            if own and (own == flow_runs[1] or (root == flow_runs[0] and not is_done)):
                stored = facts_of_file(folder / "journal.db", "batch").get("batch")
                if is_batch(batch, stored):
                    return folder
                if own == flow_runs[1] and not is_done:
                    changed = changed or folder
    if changed is not None:
        notice(
            f"the batch file has changed since this flow run has begun the run in {changed}: all jobs are trained "
            "afresh. To continue with that run, cancel this one, undo the change, and retry it"
        )
    return None


def plain_models(batches: Iterable[Path], *, home: Path, keep: int = 0, before_s: float = math.inf) -> Iterator[Path]:
    """Yields the folders of models with plain weights, written before a time, in the folders of runs, the oldest first.

    Those are of runs that are done and recorded, on this machine or on the home's pool: no run needs them any more.

    batches: the folders of batches.
    keep: how many of the newest runs of each batch keep theirs.
    """
    with ExitStack() as stack:
        pool = cache(lambda: stack.enter_context(_pool_journals(home)))
        for batch in batches:
            for run in in_order(path for path in batch.iterdir() if path.is_dir())[: -keep or None]:
                files = [path for path in (run / "models").rglob("*.safetensors") if not path.is_symlink()]
                if files and max(path.stat().st_mtime for path in files) < before_s and _is_recorded(run, pool):
                    yield from sorted({run / "models" / path.relative_to(run / "models").parts[0] for path in files})


def _is_recorded(run: Path, pool: Callable[[], Mapping[str, Journal]]) -> bool:
    """Returns whether a run is done and recorded."""
    file = run / "journal.db"
    if is_going_on(run):
        return False
    if not file.exists():
        return (journal := pool().get(str(run))) is not None and is_done_and_recorded(journal)
    with suppress(InputError), closing(Journal.of_file(file)) as journal:
        return is_done_and_recorded(journal)
    return False


def is_done_and_recorded(journal: Journal) -> bool:
    """Returns whether a run is done, and MLflow has all of its records."""
    return bool(journal.get(STATUS) == "done" and journal.get(IS_RECORDED))


@contextmanager
def _pool_journals(home: Path) -> Iterator[Mapping[str, Journal]]:
    """Yields the journals of the runs on the home's pool, also of one that is down, by the run's folder."""
    address, file = settings.checked_pool(), home / "pool" / "pool.db"
    if address is None and not file.exists():
        yield {}
        return
    with closing(Database(sqlite_url(file) if address is None else address.database)) as database:
        folders = Submissions(database).folders()
        yield {folder: Journal(database, batch=id) for id, folder in folders.items()}


def share_models(run: Path, *, home: Path, say: Callable[[str], None]) -> None:
    """Replaces plain weights of a batch's earlier runs by references to the tensor store, if a setting says so.

    Without RINGMASTER_PLAIN_RUNS, all stay: a folder that was named to the user can be read until the user changes it.

    run: the folder of a recorded run, of which `RINGMASTER_PLAIN_RUNS=0` replaces them too.
    say: shows what was replaced, and what was not.
    """
    from ringmaster.model_lineage.tensors import TensorStore

    keep, store, shared = settings.num_plain_runs(), TensorStore(settings.tensors(home)), []
    if keep is None or not store.folder.is_dir():
        return
    try:
        models = [*plain_models([run.parent], home=home, keep=max(keep, 1))]
        models += [] if keep else sorted((run / "models").glob("*"))
        shared = [model for model in models if store.share(model)]
    except (RingmasterError, OSError) as error:  # the run is recorded, and `ringmaster lineage gc` tries again
        say(f"plain weights in {run.parent} stay: {error}")
    if shared:
        say(f"{settings.PLAIN_RUNS}={keep}: {shared_text(shared)}")


def shared_text(models: Sequence[Path]) -> str:
    """Reports that the weights in folders of models have become references, and how to undo it."""
    return (
        f"weights in {len(models)} folder(s) of runs are references to the tensor store now, which `from_pretrained` "
        f"does not read. To undo: `ringmaster lineage restore {shlex.quote(str(models[0]))}`"
        + (", and so on" if len(models) > 1 else "")
    )


def is_batch(batch: Batch, stored: Any) -> bool:
    """Returns whether a journal's `stored` batch is `batch`. Fields that a later release added have their defaults."""
    with suppress(TypeError, ValueError):  # a later release wrote it
        noted = None if stored is None else Batch.from_json(stored)
        if noted is not None and any(job.evaluation.max_batches is not None for job in noted.jobs):
            # Earlier releases read another limit of evaluations from the same file, also into the text of a sweep.
            one, other = ({**each.to_json(), "text": ""} for each in (noted, batch))
            return bool(_without_limits(one) == _without_limits(other))
        # Values of files that plans follow, such as prices, are renewed: the file that names them is in the text.
        return noted is not None and replace(noted, planning={}).to_json() == replace(batch, planning={}).to_json()
    return False


def _without_limits(value: Any) -> Any:
    """Returns plain values without the limits of evaluations."""
    if isinstance(value, dict):
        return {key: _without_limits(item) for key, item in value.items() if key not in ("max_batches", "max_rows")}
    return [_without_limits(item) for item in value] if isinstance(value, list) else value


def resumed_batch(folder: Path, batch: Batch) -> Batch:
    """Returns the batch of a run as it was begun, with what files that plans follow have now, such as prices."""
    begun = begun_batch(folder)
    return replace(begun, planning=resumed_features(begun.planning, batch.planning, now_s=time.time()))


def begun_batch(folder: Path) -> Batch:
    """Returns the batch of a run as it was begun: its jobs are evaluated on as many rows as before."""
    with closing(Journal.of_file(folder / "journal.db")) as journal:
        return Batch.from_json(journal.get(BATCH))


def checkpoint_root_of(journal: Journal, *, resume: bool) -> str | None:
    """Returns and stores the root of the run's checkpoints, so that a resumed run finds them.

    Raises InputError if it cannot be written or read, or the library for its protocol is not installed.
    """
    root: str | None = journal.get(CHECKPOINT_ROOT) if resume else settings.checkpoint_root()
    settings.check_checkpoint_root(root)
    journal.put(CHECKPOINT_ROOT, root)
    return root


def with_models(batch: Batch, ledger: Ledger, journal: Journal | None, home: Path) -> tuple[Batch, dict[str, Path]]:
    """Returns the batch with what its stores, teachers and bases are, and the folders of `base_weights`.

    Raises InputError where a model does not exist, and where a job's model would have the name of another job's.
    """
    raise_faults([*_ambiguous_names(batch, ledger)])
    weights = base_weights(batch, ledger, journal, home)
    batch = with_stores(batch, ledger, journal, home)
    return replace(batch, jobs=with_base_configs(with_teachers(batch.jobs, weights), weights)), weights


def _ambiguous_names(batch: Batch, ledger: Ledger) -> Iterator[str]:
    """Yields a fault for each job whose model has the name of models that a job of another batch has made.

    Models are registered as BATCH.JOB, and both names may have points.
    """
    for job in batch.jobs:
        name = f"{batch.name}.{job.name}"
        others = [] if name.count(".") == 1 else ledger.jobs_of(name)
        for other in others:
            if other != job.name and name.endswith(f".{other}"):
                own, theirs = f"job {job.name} of batch {batch.name}", name.removesuffix(f".{other}")
                what = f"is that of {own}, and of job {other} of batch {theirs}, which has made versions of it"
                yield f"job {job.name}: its model {name} {what}. To fix: rename the job, or the batch"


def base_weights(batch: Batch, ledger: Ledger, journal: Journal | None, home: Path) -> dict[str, Path]:
    """Returns the folders of the models that jobs adapt and that no job of the batch makes: downloaded, or as they are
    named.

    The keys are job names for bases, and the models' own names for other parents. An alias is resolved once a run: the
    journal stores the version for resumed runs; a dry run has none. Raises InputError with every model that does not
    exist, and every one that an adaptation cannot use.
    """
    names = {job.name for job in batch.jobs}
    folders: dict[str, Path] = {}
    missing: dict[str, str] = {}  # by model, as all trials of a sweep may name the same one
    for job in batch.jobs:
        for parent in job.models:
            is_base = parent == job.base
            key = job.name if is_base else parent
            if parent in names or key in folders or parent in missing:
                continue
            if is_folder(parent):
                folders[key] = Path(parent)
                continue
            try:
                known = None if journal is None else journal.get(f"base:{key}")
                uri = known or ledger.resolve_model(parent).uri
                folders[key] = ledger.download_model(uri, home / "cache" / "models")
                ledger.check_use(ledger.resolve_model(uri), "base", folder=folders[key])
                if journal is not None:
                    journal.put(f"base:{key}", uri)
            except (LedgerError, SignatureError) as error:
                num_more = sum(parent in other.models for other in batch.jobs) - 1  # `job` is the first that names it
                who = f"job {job.name}" + (f" and {num_more} more" if num_more else "")
                missing[parent] = f"{who}: {'base' if is_base else 'parent'} {parent}: {error}"
    faults = [*missing.values(), *unfit_parents(batch.jobs, folders)]
    raise_faults(faults)
    return folders


def with_stores(batch: Batch, ledger: Ledger, journal: Journal | None, home: Path) -> Batch:
    """Returns the batch with the folders of the knowledge stores that its jobs' data names by version.

    A store that a job of the batch makes keeps its name until it is there.
    An alias is resolved once a run, as those of bases are. Raises InputError with every store that does not exist.
    """
    folders: dict[str, str] = {}
    faults = []
    names = {job.name for job in batch.jobs}
    for job in batch.jobs:
        store = job.data.store
        if store is None or store in names or is_folder(store) or store in folders:
            continue
        try:
            known = None if journal is None else journal.get(f"store:{store}")
            uri = known or ledger.resolve_model(store).uri
            folders[store] = folder = str(store_folder(ledger, uri, home))
            if journal is not None:
                journal.put_all({f"store:{store}": uri, f"store:{folder}": uri})
        except (LedgerError, SignatureError, ValueError) as error:
            folders[store] = ""
            faults.append(f"job {job.name}: data.retriever.store {store}: {error}")
    raise_faults(faults)
    jobs = [
        replace(job, data=job.data.reading(store=folders[job.data.store])) if job.data.store in folders else job
        for job in batch.jobs
    ]
    return replace(batch, jobs=tuple(jobs))


def store_folder(ledger: Ledger, uri: str, home: Path) -> Path:
    """Returns the folder with the files of a store. Raises LedgerError where there is none of this name."""
    record = ledger.resolve_model(uri)
    if record.kind != INDEXED:
        raise LedgerError(f"{record.uri} is not a knowledge store. To fix: name one, made by a job of kind store")
    folder = ledger.download_model(uri, home / "cache" / "models")
    ledger.check_use(record, "base", folder=folder)
    return folder
