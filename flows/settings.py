"""Where everything is kept, and the settings of the libraries that read the environment when they are imported."""

from __future__ import annotations

import os
from pathlib import Path

from model_lineage import QUIET_ENVIRONMENT


def home() -> Path:
    """The folder that holds all that is written: RINGMASTER_HOME, or `.ringmaster` in the working directory."""
    return Path(os.environ.get("RINGMASTER_HOME", ".ringmaster")).absolute()


def tracking_uri(folder: Path) -> str:
    """Where MLflow keeps its records: MLFLOW_TRACKING_URI, or a SQLite file in `folder`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"


def checkpoint_root() -> str | None:
    """Where checkpoints go: RINGMASTER_CHECKPOINTS, a folder or an fsspec URL; None for the folder of each run."""
    root = os.environ.get("RINGMASTER_CHECKPOINTS")
    return str(Path(root).absolute()) if root and "://" not in root else root or None


def embed(folder: Path) -> None:
    """Prepares the environment for a run that brings its own servers; must come before prefect and mlflow are imported.

    What the user has set stays: PREFECT_API_URL, for example, makes the same run report to a server.
    """
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
        "DO_NOT_TRACK": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Prefect's server does not make its folder, and without it waits for a database that cannot come.
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
