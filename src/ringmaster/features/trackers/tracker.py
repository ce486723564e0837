"""A tracker: where the curves, hyperparameters and final metrics of jobs are written, besides MLflow."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class TrackedJob:
    """A job of which a tracker has a run.

    Attributes:
        run_id: the id of its run in MLflow.
        params: its hyperparameters by dotted names, as in MLflow: numbers, booleans and texts.
        tags: with the ids of the runs of the job and the batch in MLflow.
    """

    batch: str
    job: str
    run_id: str
    params: Mapping[str, Any]
    tags: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name of its run: a batch that is run again has further ones."""
        return f"{self.job}-{self.run_id[:8]}"


class Scalar(NamedTuple):
    """A value of a curve after a step. time_s: seconds since the epoch."""

    key: str
    value: float
    step: int
    time_s: float


class Tracker(ABC):
    """One tracker, for all jobs of a batch. All methods are called by one thread, and may raise anything.

    A run is opened again where a batch is resumed.
    """

    def __init__(self, folder: Path) -> None:
        """folder: of all that it writes on this machine."""
        self.folder = folder

    @abstractmethod
    def open_run(self, job: TrackedJob) -> None:
        """Begins the run of a job, or continues it."""

    @abstractmethod
    def add(self, job: str, scalars: Sequence[Scalar]) -> None:
        """Adds values to the curves of an open run."""

    @abstractmethod
    def end_run(self, job: str, metrics: Mapping[str, float], *, step: int, status: str) -> None:
        """Ends an open run.

        Args:
            job: its name.
            metrics: the final metrics.
            step: the number of steps that were trained.
            status: of the job, such as "done".
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the runs that are still open, of jobs that did not end."""


def tracker_folder() -> Path:
    """Returns the folder of all trackers, in RINGMASTER_HOME."""
    return Path(os.environ.get("RINGMASTER_HOME") or ".ringmaster").absolute() / "trackers"


def plain_params(params: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Returns parameters by dotted names, without those that are None: numbers, booleans and texts."""
    plain: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            plain |= plain_params(value, prefix=f"{prefix}{key}.")
        elif value is not None:
            plain[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return plain


def by_step(scalars: Sequence[Scalar]) -> dict[tuple[int, float], dict[str, float]]:
    """Returns the values that belong together: by step and time, those of each curve."""
    grouped: dict[tuple[int, float], dict[str, float]] = {}
    for each in scalars:
        grouped.setdefault((each.step, each.time_s), {})[each.key] = each.value
    return grouped


def project_name(batch: str) -> str:
    """Returns the name of a batch's project: trackers take letters, digits, "-" and "_"."""
    return f"ringmaster-{re.sub(r'[^A-Za-z0-9_-]', '-', batch)}"
