"""The ledger's connection to MLflow: one explicit client, created at first use, and the sqlite database behind it.

Importing MLflow takes a second or more, and so does creating a database. `warm_up` does both, in a background thread if
need be. The connection touches neither MLflow's fluent state nor the environment.

MLflow retries a file that it cannot open for a minute. It creates a database in dozens of migrations, each written to
disk (seconds). Two processes that do so at once fail, and one that is killed half-way leaves a file that fails ever
after. The database is therefore created aside, in memory if the machine has a place for that, and moved into place
atomically.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ringmaster.compat.mlflow import DATABASE_LOGGER, MIGRATION_LOGGERS, MIGRATIONS, move_experiments
from ringmaster.errors import LedgerError
from ringmaster.files import write_atomically
from ringmaster.model_lineage import sqlite_files
from ringmaster.model_lineage.database_templates import create_from_template
from ringmaster.model_lineage.mlflow_calls import TENSORS_SCHEME, OutageRetry, RetryingClient, tensors_uri
from ringmaster.text import redacted

if TYPE_CHECKING:  # they import numpy and MLflow
    from ringmaster.model_lineage.signatures import SigningKeys
    from ringmaster.model_lineage.tensors import TensorStore
    from ringmaster.model_lineage.tensors.artifacts import TensorArtifactRepository

QUIET_ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Environment variables to set before MLflow is imported, so that it sends no telemetry and prints nothing on stdout.
"""

EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""By which MLflow opens an experiment with its runs and curves, and not with the evaluation runs of its GenAI view."""
PROFILES = "-profiles"  # ends the name of the experiment of the profiles
_PAGE = 1000
_served_folders: dict[str, Path] = {}  # the folder of the files that a server has stored, by tracking URI


def batch_experiment(experiment: str, batch: str) -> str:
    """Returns the name of the experiment of a batch, a sweep or a retraining file, in the ledger of `experiment`."""
    return f"{experiment}/{batch}"


def paged(search: Callable[..., Any], *arguments: Any, max_results: int = _PAGE, **options: Any) -> Iterator[Any]:
    """Yields the results of one of MLflow's searches, page by page. arguments, options: the search's."""
    token = None
    while True:
        page = search(*arguments, max_results=max_results, page_token=token, **options)
        yield from page
        token = page.token
        if not token:
            return


class Connection:
    """A lazily opened MLflow store that several threads may use.

    tracking_uri: "sqlite:////absolute/path/mlflow.db", another database, or an MLflow server's "http(s)://...".
    experiment: the ledger's own experiment, created at first use. A batch's runs and models go to an experiment named
        EXPERIMENT/BATCH.
    artifact_root: the folder for files if a database is used directly; None means a folder next to the sqlite file.
        A server has its own.
    tensors: the folder of the tensor store, which then holds the weights among the files; None stores them plain.
    is_served_here: whether a server's folder is `artifact_root`. Files are then accessed without the server.
    keys: with the keys of signatures; None where nothing is signed or verified.
    waiting: retries every call for as long as the store is unreachable; without it, failing calls raise soon.
    """

    def __init__(
        self,
        tracking_uri: str,
        *,
        experiment: str = "ringmaster",
        artifact_root: Path | None = None,
        tensors: Path | None = None,
        is_served_here: bool = False,
        keys: SigningKeys | None = None,
        waiting: OutageRetry | None = None,
    ) -> None:
        self.keys = keys
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.file = sqlite_file(tracking_uri)
        if artifact_root is None and self.file is not None:
            artifact_root = self.file.parent / "artifacts"
        self._is_server = urlsplit(tracking_uri).scheme in ("http", "https")
        is_far = self._is_server and not is_served_here
        self._artifact_root = None if is_far or artifact_root is None else artifact_root.absolute()
        self._tensors = tensors
        self._waiting = waiting
        self._lock = threading.RLock()
        self._opened: RetryingClient | None = None
        self._experiment_ids: dict[str, str] = {}
        self._untagged: dict[str, dict[str, str]] = {}  # by experiment: the EXPERIMENT_TAGS that it lacks

    @property
    def store(self) -> TensorStore | None:
        """The tensor store, or None if there is none."""
        from ringmaster.model_lineage.tensors import TensorStore

        return None if self._tensors is None else TensorStore(self._tensors)

    def warm_up(self, *, batch: str | None = None) -> None:
        """Opens the store now: imports MLflow, creates or checks the database, and creates the experiment.

        Raises LedgerError where that fails, or where an experiment to which the records of `batch` go was deleted.
        """
        self.experiment_id(self.experiment)
        for name in (f"{self.experiment}{PROFILES}", *([batch_experiment(self.experiment, batch)] if batch else [])):
            if self.experiment_id(name, create=False) is not None:
                self._tag_untagged(name)

    @property
    def client(self) -> Any:
        """The guarded MlflowClient. Raises LedgerError if the store cannot be opened."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def experiment_id(self, name: str, *, create: bool = True) -> str | None:
        """Returns the id of experiment `name`. If it is missing, creates it, or returns None if `create` is off."""
        with self._lock:
            if name in self._experiment_ids:
                if create:
                    self._tag_untagged(name)
                return self._experiment_ids[name]
            result = self.client.get_experiment_by_name(name)
            if result is None and not create:
                return None
            if result is not None:
                self.check_experiment(result)
            self._experiment_ids[name] = result.experiment_id if result else self._create_experiment(name)
            if result is not None:
                self._untagged[name] = {key: v for key, v in EXPERIMENT_TAGS.items() if key not in result.tags}
                if create:
                    self._tag_untagged(name)
            return self._experiment_ids[name]

    def check_experiment(self, experiment: Any) -> None:
        """Raises LedgerError if an experiment, as MLflow has it, was deleted."""
        if experiment.lifecycle_stage != "active":
            raise LedgerError(
                f"experiment {experiment.name!r} was deleted in MLflow at {redacted(self.tracking_uri)}. "
                f"To fix: MLFLOW_TRACKING_URI={shlex.quote(redacted(self.tracking_uri))} "
                f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
            )

    def _tag_untagged(self, name: str) -> None:
        """Gives an experiment of an earlier release the tags that it lacks, once, when it is opened for writing.

        Its records matter more than its tags: who may not change these may still write runs.
        """
        for key, value in self._untagged.pop(name, {}).items():
            with suppress(LedgerError):
                self.client.set_experiment_tag(self._experiment_ids[name], key, value)

    def experiment_ids(self) -> list[str]:
        """Returns the ids of the ledger's own experiment and of those of its batches, as far as they exist."""
        from mlflow.entities import ViewType

        like = f"name LIKE '{self.experiment}%'"
        every = paged(self.client.search_experiments, view_type=ViewType.ACTIVE_ONLY, filter_string=like)
        return [str(result.experiment_id) for result in every if f"{result.name}/".startswith(f"{self.experiment}/")]

    def artifacts(self, location: str) -> TensorArtifactRepository | None:
        """Returns access to the artifacts at a location that keep weights in the tensor store, without a server.

        None for artifacts that a server or a plain folder holds.
        """
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        from ringmaster.model_lineage.tensors.artifacts import TensorArtifactRepository

        self.client  # noqa: B018  it registers the repositories
        if self._tensors is None or urlsplit(location).scheme not in (TENSORS_SCHEME, "mlflow-artifacts"):
            return None
        result = get_artifact_repository(location, tracking_uri=self.tracking_uri)
        return result if isinstance(result, TensorArtifactRepository) else None

    def _create_experiment(self, name: str) -> str:
        location = None
        if self._artifact_root is not None and not self._is_server:
            folder = self._artifact_root / name
            location = folder.as_uri() if self._tensors is None else tensors_uri(folder)
        try:
            return str(self.client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))
        except LedgerError as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(self.client.get_experiment_by_name(name).experiment_id)  # another process has created it

    def _open(self) -> RetryingClient:
        if self.file is not None:
            create_database(self.file)
            if self._tensors is not None and self._artifact_root is not None and sqlite_files.is_writable(self.file):
                _move_into_store(self.file, self._artifact_root)
        from mlflow import MlflowClient

        # MLflow logs each with its traceback; the error that is raised says the cause.
        logging.getLogger(DATABASE_LOGGER).addFilter(_is_no_database_error)
        guard = RetryingClient(None, tracking_uri=self.tracking_uri, waiting=self._waiting)
        client = guard.call(MlflowClient, self.tracking_uri, registry_uri=self.tracking_uri)
        if self._artifact_root is not None:
            _access_files(self.tracking_uri, self._artifact_root, tensors=self._tensors)
        return RetryingClient(client, tracking_uri=self.tracking_uri, waiting=self._waiting)


def _is_no_database_error(record: logging.LogRecord) -> bool:
    """Whether a record of MLflow is another one than that of an error, which it raises as well."""
    return not record.exc_info


def _access_files(tracking_uri: str, folder: Path, *, tensors: Path | None) -> None:
    """Lets clients in this process access the files of a ledger in a folder, whichever client has created them.

    A server gives its experiments locations such as mlflow-artifacts:/2, which MLflow's own client resolves through a
    server only. A home's database is opened directly whenever its pool is down.
    """
    from ringmaster.model_lineage.tensors import TensorStore
    from ringmaster.model_lineage.tensors.artifacts import register

    if tensors is not None:
        try:
            TensorStore(tensors).add_artifacts(folder)
        except OSError as error:  # whoever may only read adds no references, either
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    _served_folders[tracking_uri] = folder
    register()
    register("mlflow-artifacts", _served_repository)


def _served_repository(artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> Any:
    """Returns MLflow's access to the files at a mlflow-artifacts location: in a folder where that is known."""
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
    from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository

    from ringmaster.model_lineage.tensors.artifacts import TensorArtifactRepository
    from ringmaster.model_lineage.tensors.store import STORE_LINK

    parts, folder = urlsplit(artifact_uri), _served_folders.get(tracking_uri or "")
    if folder is None or parts.netloc:
        return MlflowArtifactsRepository(artifact_uri, tracking_uri=tracking_uri, registry_uri=registry_uri)
    below = folder / unquote(parts.path).lstrip("/")
    if not (folder / STORE_LINK).is_dir():  # of a ledger without a tensor store
        return LocalArtifactRepository(below.as_uri())
    return TensorArtifactRepository(tensors_uri(below))


def _move_into_store(file: Path, folder: Path) -> None:
    """Gives experiments of earlier releases, whose files are plain, a location that keeps weights in the tensor store.

    Runs and models that are there keep their own locations.
    """
    with closing(sqlite3.connect(file, timeout=sqlite_files.TIMEOUT_S)) as connection, connection:
        move_experiments(connection, old=f"{folder.as_uri()}/", new=f"{tensors_uri(folder)}/")


SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https")
# A container may give it 64 kB. What is written there is in a new folder of `tempfile`, which only we can open.
_MEMORY = Path("/dev/shm")  # noqa: S108
DRAFT_BYTES = 16 << 20  # for a new database of 1 MB, and what its migrations copy


def sqlite_file(tracking_uri: str) -> Path | None:
    """Returns the file of a sqlite URI, or None for another store. Raises LedgerError on an unsupported URI."""
    scheme = urlsplit(tracking_uri).scheme.partition("+")[0]
    if scheme not in SCHEMES:
        raise LedgerError(
            f"{redacted(tracking_uri)!r} is not a place for an MLflow ledger. "
            "To fix: use sqlite:////absolute/path/mlflow.db, postgresql://..., or a server's http://..."
        )
    if scheme != "sqlite":
        return None
    path = sqlite_files.path_of(tracking_uri)
    if not path or path == ":memory:":
        raise LedgerError("a ledger in memory is lost at once. To fix: use sqlite:////absolute/path/mlflow.db.")
    return Path(path).absolute()


def create_database(file: Path) -> None:
    """Creates an MLflow database at `file` unless there is one. Raises LedgerError.

    One that is there need not be writable: a user may read the records of others.
    """
    is_there = file.is_file() and file.stat().st_size > 0
    if fault := database_fault(file, writes=not is_there or sqlite_files.is_writable(file)):
        raise LedgerError(fault)
    if is_there:
        return
    from sqlalchemy.exc import SQLAlchemyError

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with sqlite_files.exclusive_lock(file.parent):
            if not file.exists() or not file.stat().st_size:
                # The default experiment has a place for files, which depends on this process.
                create_from_template(
                    file, migrations=MIGRATIONS, make=lambda: _write_database(file), emptied=("experiments",)
                )
    except (OSError, sqlite3.Error, SQLAlchemyError) as error:
        error = getattr(error, "orig", error)  # without the statement
        raise LedgerError(
            f"the ledger {file} cannot be written: {error}. "
            "To fix: free space, give this user access, or choose another place.",
            code="IO_ERROR",
        ) from error


def database_fault(file: Path, *, writes: bool = True) -> str | None:
    """Returns why an MLflow database cannot be used, with a remedy; None if it can, or if there is none yet.

    writes: whether it is to be written, too.
    """
    return sqlite_files.fault_of(file, contents="the records of earlier runs", versions=MIGRATIONS, writes=writes)


def _write_database(file: Path) -> None:
    from mlflow import MlflowClient

    has_room = os.access(_MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(_MEMORY).free >= DRAFT_BYTES
    place = _MEMORY if has_room else file.parent
    with tempfile.TemporaryDirectory(dir=place, prefix=".mlflow-") as folder, _quiet_migrations():
        draft = Path(folder) / file.name
        MlflowClient(sqlite_files.sqlite_url(draft))
        write_atomically(file, draft.read_bytes())


@contextmanager
def _quiet_migrations() -> Iterator[None]:
    """Context manager that suppresses MLflow's log messages below WARNING while it creates a database."""

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    loggers = [logging.getLogger(name) for name in MIGRATION_LOGGERS]
    for logger in loggers:
        logger.addFilter(is_warning)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_warning)
