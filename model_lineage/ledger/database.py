"""Creation and checking of the sqlite database behind a ledger, before MLflow opens it.

MLflow retries a file that it cannot open for a minute. It creates a database in dozens of migrations, each written to
disk (seconds). Two processes that do so at once fail, and one that is killed half-way leaves a file that fails ever
after. The database is therefore created aside, in memory if the machine has a place for that, and moved into place
atomically.
"""

import fcntl
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ringmaster.model_lineage.faults import LedgerError, redacted

SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https")
_MEMORY = Path("/dev/shm")
_PATIENCE_S = 30.0  # the lock timeout for a database that another program holds


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
    path = unquote(tracking_uri.partition(":///")[2].partition("?")[0])
    if not path or path == ":memory:":
        raise LedgerError("a ledger in memory is lost at once. To fix: use sqlite:////absolute/path/mlflow.db.")
    return Path(path).absolute()


def prepare(file: Path) -> None:
    """Creates an MLflow database at `file` unless there is one. Raises LedgerError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _alone(file.parent):
            if _is_empty(file):
                _make(file)
    except (OSError, sqlite3.OperationalError) as error:
        raise LedgerError(
            f"the ledger {file} cannot be written: {error}. "
            "To fix: free space, give this user access, or choose another place.",
            code="IO_ERROR",
        ) from error
    except sqlite3.DatabaseError as error:
        raise LedgerError(
            f"{file} is no sqlite database ({error}). To fix: restore it from a copy, or choose another place."
        ) from error


def _is_empty(file: Path) -> bool:
    """Whether a database has no schema yet."""
    with closing(sqlite3.connect(file, timeout=_PATIENCE_S)) as connection:
        return bool(connection.execute("PRAGMA schema_version").fetchone()[0] == 0)


def _make(file: Path) -> None:
    from mlflow import MlflowClient

    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="mlflow-") as folder, _quiet_migrations():
        draft = Path(folder) / file.name
        MlflowClient(f"sqlite:///{draft}")
        aside = file.with_name(f".{file.name}.new")
        with draft.open("rb") as source, aside.open("wb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        aside.replace(file)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Context manager that admits one process at a time; the lock ends with the process that holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
