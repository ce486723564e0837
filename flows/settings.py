"""Where everything is kept, and the settings of the libraries that read the environment when they are imported."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from ringmaster.flows import ownership
from ringmaster.flows.faults import InputError
from ringmaster.model_lineage import QUIET_ENVIRONMENT

JSON_RESULTS = {
    # A parent reads what its child has returned only where that is stored; and never as a pickle.
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
}


OWN_NODE = "RINGMASTER_NODE"
"""Names the node whose worker started a process; without it, a machine's own name is its node's."""

NOTIFY = "RINGMASTER_NOTIFY"
"""Says where a pool's alarms go: a webhook's address, or TYPE/NAME of one of Prefect's notification blocks."""

# Whoever records waits for a server that is away, and can be told to stop; inside MLflow it would wait for minutes.
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


@dataclass(frozen=True, kw_only=True)
class PoolAddress:
    """Where the pool is that this machine belongs to.

    database: of the pool, `sqlite:///FILE` or `postgresql://...`. prefect_api: ends in `/api`. mlflow_uri: of the
    server. work_pool: Prefect's, on which nodes have their queues. username, password: for both servers, where
    password is not empty.
    """

    database: str = field(repr=False)  # may hold a password
    prefect_api: str
    mlflow_uri: str
    work_pool: str = "ringmaster"
    username: str = "ringmaster"
    password: str = field(default="", repr=False)

    def environment(self) -> dict[str, str]:
        """What the environment of a process must say, so that it, Prefect and MLflow in it belong to the pool."""
        names = {
            "RINGMASTER_DATABASE": self.database,
            "PREFECT_API_URL": self.prefect_api,
            "MLFLOW_TRACKING_URI": self.mlflow_uri,
            **JSON_RESULTS,
        }
        if self.password:
            names["PREFECT_API_AUTH_STRING"] = f"{self.username}:{self.password}"
            names["MLFLOW_TRACKING_USERNAME"] = self.username
            names["MLFLOW_TRACKING_PASSWORD"] = self.password
        return names


def home() -> Path:
    """The folder that holds all that is written: RINGMASTER_HOME, or `.ringmaster` in the working directory."""
    return Path(os.environ.get("RINGMASTER_HOME", ".ringmaster")).absolute()


def pool_file(folder: Path) -> Path:
    """Where `ringmaster up` writes which pool a home belongs to, while that pool is up."""
    return folder / "pool.json"


def pool() -> PoolAddress | None:
    """The pool that this machine belongs to: what the environment says of it, else what `ringmaster up` wrote.

    The environment may name all of a pool (RINGMASTER_DATABASE, PREFECT_API_URL, MLFLOW_TRACKING_URI) or, where a pool
    is up in this home, another way to a part of it. None where neither the environment nor the home names a pool.

    Raises InputError where a part is missing.
    """
    file = pool_file(home())
    said = json.loads(file.read_text()) if file.exists() else {}
    if not (said or os.environ.get("RINGMASTER_DATABASE")):
        return None
    variables = {
        "database": "RINGMASTER_DATABASE",
        "prefect_api": "PREFECT_API_URL",
        "mlflow_uri": "MLFLOW_TRACKING_URI",
        "username": "MLFLOW_TRACKING_USERNAME",
        "password": "MLFLOW_TRACKING_PASSWORD",
    }
    said |= {key: os.environ[variable] for key, variable in variables.items() if os.environ.get(variable)}
    missing = [variables[key] for key in ("database", "prefect_api", "mlflow_uri") if key not in said]
    if missing:
        names = " and ".join(missing)
        raise InputError([f"RINGMASTER_DATABASE names a pool, whose {names} the environment must name too"])
    return PoolAddress(**said)


def tracking_uri(folder: Path) -> str:
    """Where MLflow keeps its records: MLFLOW_TRACKING_URI, the server of the pool, or a SQLite file in `folder`."""
    if said := os.environ.get("MLFLOW_TRACKING_URI"):
        return said
    address = pool()
    return address.mlflow_uri if address else f"sqlite:///{folder / 'mlflow.db'}"


def tensors(folder: Path) -> Path:
    """Where the tensors of recorded models are kept: RINGMASTER_TENSORS, or in `folder`."""
    return Path(os.environ.get("RINGMASTER_TENSORS") or folder / "tensors").absolute()


def checkpoint_root() -> str | None:
    """Where checkpoints go: RINGMASTER_CHECKPOINTS, a folder or an fsspec URL; None for the folder of each run."""
    root = os.environ.get("RINGMASTER_CHECKPOINTS")
    return str(Path(root).absolute()) if root and "://" not in root else root or None


def embed(folder: Path) -> None:
    """Prepares the environment for a run that brings its own servers; must come before prefect and mlflow are imported.

    What the user has set stays: PREFECT_API_URL, for example, makes the same run report to a server. Where a pool is
    up, its servers are the ones that are used. What this process writes from here on is its owner's alone.
    """
    ownership.keep_to_owner(folder)
    address = pool()
    defaults = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # A run's log is kept for Prefect's UI; the terminal has a view of its own.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # Prefect's server starts in the working folder too, and must not import what happens to lie there.
        "PYTHONSAFEPATH": "1",
        **QUIET_ENVIRONMENT,
        **MLFLOW_PATIENCE,
        "DO_NOT_TRACK": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": JSON_RESULTS["PREFECT_RESULTS_DEFAULT_SERIALIZER"],
        **(address.environment() if address else {}),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Prefect's server does not make its folder, and without it waits for a database that cannot come.
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
