"""Creation and checking of the sqlite database behind a ledger, before MLflow opens it.

MLflow retries a file that it cannot open for a minute. It creates a database in dozens of migrations, each written to
disk (seconds). Two processes that do so at once fail, and one that is killed half-way leaves a file that fails ever
after. The database is therefore created aside, in memory if the machine has a place for that, and moved into place
atomically.
"""

import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import sqlite_files
from ringmaster.model_lineage.mlflow_calls import redacted

SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https")
_MEMORY = Path("/dev/shm")
MIGRATIONS = "mlflow:store/db_migrations/versions"


def sqlite_file(tracking_uri: str) -> Path | None:
    """Returns the file of a sqlite URI, or None for another store. Raises LedgerError on an unsupported URI."""
    scheme = urlsplit(tracking_uri).scheme.partition("+")[0]
    if scheme not in SCHEMES:
        raise LedgerError(
            f"{redacted(tracking_uri)!r} is no place for an MLflow ledger. "
            "To fix: use sqlite:////absolute/path/mlflow.db, postgresql://..., or a server's http://..."
        )
    if scheme != "sqlite":
        return None
    path = sqlite_files.path_of(tracking_uri)
    if not path or path == ":memory:":
        raise LedgerError("a ledger in memory is lost at once. To fix: use sqlite:////absolute/path/mlflow.db.")
    return Path(path).absolute()


def prepare(file: Path) -> None:
    """Creates an MLflow database at `file` unless there is one. Raises LedgerError."""
    if fault := fault_of(file):
        raise LedgerError(fault)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with sqlite_files.alone_in(file.parent):
            if _is_empty(file):
                _make(file)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(
            f"the ledger {file} cannot be written: {error}. "
            "To fix: free space, give this user access, or choose another place.",
            code="IO_ERROR",
        ) from error


def fault_of(file: Path) -> str | None:
    """Returns why an MLflow database cannot be used, with a remedy; None if it can, or if there is none yet."""
    return sqlite_files.fault_of(file, contents="the records of earlier runs", versions=MIGRATIONS)


def _is_empty(file: Path) -> bool:
    """Whether a database has no schema yet."""
    with closing(sqlite3.connect(file, timeout=sqlite_files.PATIENCE_S)) as connection:
        return bool(connection.execute("PRAGMA schema_version").fetchone()[0] == 0)


def _make(file: Path) -> None:
    from mlflow import MlflowClient

    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="mlflow-") as folder, _quiet_migrations():
        draft = Path(folder) / file.name
        MlflowClient(sqlite_files.sqlite_url(draft))
        aside = file.with_name(f".{file.name}.new")
        with draft.open("rb") as source, aside.open("wb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        aside.replace(file)


@contextmanager
def _quiet_migrations() -> Iterator[None]:
    """Context manager that suppresses MLflow's log messages below WARNING while it creates a database."""

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    loggers = [logging.getLogger(name) for name in ("mlflow.store.db.utils", "alembic.runtime.migration")]
    for logger in loggers:
        logger.addFilter(is_warning)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_warning)
