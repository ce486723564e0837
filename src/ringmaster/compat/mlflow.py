"""Private and undocumented names of MLflow, and the tables of its database. Importing this imports no MLflow."""

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# -- artifacts ---------------------------------------------------------------------------------------------------------


def register_artifact_repository(scheme: str, repository: Callable[..., Any]) -> None:
    """Makes MLflow in this process use a repository for artifact URIs of a scheme, also in place of its own.

    The public way is an entry point, which exists where the package is installed, and cannot replace a repository of
    MLflow. Without it models of a pool that is down cannot be read, nor any in a checkout.
    """
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry

    _artifact_repository_registry.register(scheme, repository)


# -- the server --------------------------------------------------------------------------------------------------------

AUTHENTICATING = "mlflow.server.auth:create_app"
OPEN = "mlflow.server.fastapi_app:app"
"""What `mlflow server` makes uvicorn serve, with basic authentication and without."""


def start_server_by(start: Callable[..., Any]) -> None:
    """Makes `mlflow server` call `start`, with the command line of uvicorn, where it would start a child process.

    It is the only function by which it does so. Without it each server is two processes, the first of which waits for
    the second one with 215 MB.
    """
    import mlflow.server

    assert hasattr(mlflow.server, "_exec_cmd"), "this MLflow starts its server in another way"
    mlflow.server._exec_cmd = start


def authenticating_app() -> Any:
    """Returns MLflow's application with basic authentication: `AUTHENTICATING`.

    MLflow reads its settings when it is imported. Without it the password cannot be required everywhere.
    """
    import mlflow.server.auth

    return mlflow.server.auth.create_app()


def open_app() -> Any:
    """Returns MLflow's application without authentication: `OPEN`.

    Without it pages of other servers on this machine may use it.
    """
    from mlflow.server.fastapi_app import app

    return app


# -- the database ------------------------------------------------------------------------------------------------------
# Clients read the models of a home, and move them, in the SQLite file itself. MLflow's client takes a second to import
# and 40 times as long to read, and it cannot change the place of an experiment, a run or a model at all. Without the
# tables a lineage is read slowly, by the client, and a home that was copied or moved writes into its former place.

MIGRATIONS = "mlflow:store/db_migrations/versions"
"""Where the versions of the tables are: without it a database of another release is found damaged, not too new."""

DATABASE_LOGGER = "mlflow.store.db.utils"
"""The logger of a database's faults: without it each is printed with its traceback before the error that is raised."""

MIGRATION_LOGGERS = (DATABASE_LOGGER, "alembic.runtime.migration")
"""The loggers of migrations: without them each new home prints 60 lines."""

LOCATIONS = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""Columns of tables with the URIs of files."""
TAGS = {"tags": "value", "experiment_tags": "value", "logged_model_tags": "tag_value", "model_version_tags": "value"}
"""Columns of tables in which tags name folders, JSON texts among them."""

_READY = 2  # the status of a LoggedModel that is complete

_OF_LEDGER = (
    "experiment_id IN (SELECT experiment_id FROM experiments WHERE lifecycle_stage = 'active' "
    "AND (name = :experiment OR substr(name, 1, length(:experiment) + 1) = :experiment || '/'))"
)


def experiment_locations(connection: sqlite3.Connection) -> list[tuple[str | None, str]]:
    """Returns the location and the name of each experiment; none where the tables are not there yet."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
        return []
    return connection.execute("SELECT artifact_location, name FROM experiments").fetchall()


def move_experiments(connection: sqlite3.Connection, *, old: str, new: str) -> None:
    """Replaces the beginning `old` of experiments' locations by `new`."""
    fields, is_old = {"old": old, "new": new, "length": len(old)}, "substr(artifact_location, 1, :length) = :old"
    if connection.execute(f"SELECT 1 FROM experiments WHERE {is_old}", fields).fetchone():
        location = "artifact_location = :new || substr(artifact_location, :length + 1)"
        connection.execute(f"UPDATE experiments SET {location} WHERE {is_old}", fields)


def model_tags(connection: sqlite3.Connection, *, experiment: str, but: str) -> sqlite3.Cursor:
    """Yields (model id, key, value) of models' tags, without notes and those like the pattern `but`.

    experiment: whose models, and those of experiments below it.
    """
    return connection.execute(
        f"SELECT model_id, tag_key, tag_value FROM logged_model_tags WHERE {_OF_LEDGER} "
        "AND tag_key != 'mlflow.note.content' AND tag_key NOT LIKE :but",
        {"experiment": experiment, "but": but},
    )


def model_params(connection: sqlite3.Connection, *, experiment: str) -> sqlite3.Cursor:
    """Yields (model id, key, value) of models' parameters."""
    return connection.execute(
        f"SELECT model_id, param_key, param_value FROM logged_model_params WHERE {_OF_LEDGER}",
        {"experiment": experiment},
    )


def model_metrics(connection: sqlite3.Connection, *, experiment: str) -> sqlite3.Cursor:
    """Yields (model id, name, value) of models' metrics, in the order in which they were measured."""
    return connection.execute(
        f"SELECT model_id, metric_name, metric_value FROM logged_model_metrics WHERE {_OF_LEDGER} "
        "ORDER BY metric_step, metric_timestamp_ms",
        {"experiment": experiment},
    )


def models(connection: sqlite3.Connection, *, experiment: str) -> Iterator[Mapping[str, Any]]:
    """Yields the models, oldest first, by the names that MLflow's LoggedModel has for their fields, and `is_ready`."""
    rows = connection.execute(
        "SELECT model_id, experiment_id, name, artifact_location, creation_timestamp_ms, source_run_id, status "
        f"FROM logged_models WHERE {_OF_LEDGER} AND lifecycle_stage = 'active' "
        "ORDER BY creation_timestamp_ms, model_id",
        {"experiment": experiment},
    )
    for id, experiment_id, name, location, created_ms, run_id, status in rows:
        yield {
            "model_id": id,
            "experiment_id": str(experiment_id),
            "name": name,
            "artifact_location": location,
            "creation_timestamp": created_ms,
            "source_run_id": run_id,
            "is_ready": status == _READY,
        }


def aliases(connection: sqlite3.Connection) -> sqlite3.Cursor:
    """Yields (name, alias, version) of registered models."""
    return connection.execute("SELECT name, alias, version FROM registered_model_aliases")


def version_tags(connection: sqlite3.Connection, *, key: str) -> sqlite3.Cursor:
    """Yields (name, version, value) of one tag of the versions of registered models."""
    return connection.execute("SELECT name, version, value FROM model_version_tags WHERE key = ?", [key])
