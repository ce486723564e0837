"""The folders of one run of a batch: of its checkpoints, its models, the logs of its gangs, and prepared data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.codec import digest
from ringmaster.techniques import Job
from ringmaster.techniques.checkpoints.storage import is_url, join_root
from ringmaster.techniques.processes.order import KEPT_CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """The folders of one run of a batch, and the paths that its workers need.

    folder: of this run; holds checkpoints, models and gang logs.
    cache_dir: prepared data.
    import_paths: folders appended to the workers' import path.
    weights: folders of models that are not in the batch: of base models by the job that adapts them, of other parents
        by the name that the job gives them.
    data: the prepared data of each job, as the preflight recorded it.
    checkpoint_every_s: seconds between checkpoints; None to derive it from the cost of a save and the failure rate.
    checkpoint_root: a folder or an fsspec URL for checkpoints instead of `folder`.
    keep_checkpoints: how many checkpoints of each job are kept.
    """

    folder: Path
    cache_dir: Path
    import_paths: tuple[str, ...] = ()
    weights: Mapping[str, Path] = field(default_factory=dict)
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checkpoint_every_s: float | None = None
    checkpoint_root: str | None = None
    keep_checkpoints: int = KEPT_CHECKPOINTS

    def model_dir(self, job: str) -> Path:
        """Returns the folder of a job's finished model."""
        return self.folder / "models" / job

    def model_url(self, job: str) -> str | None:
        """Returns where a job's finished model is stored, next to its checkpoints; None where these are in a folder."""
        return self._url(job, "model")

    def weights_url(self, folder: Path) -> str | None:
        """Returns where the model of one of the folders in `weights` is stored; None as for `model_url`."""
        return self._url(".weights", digest(str(folder)))

    def checkpoint_dir(self, job: Job) -> str:
        """Returns the folder or URL of a job's checkpoints. A job that runs a command always uses a folder."""
        if self.checkpoint_root is None or job.is_black_box:
            return str(self.folder / "checkpoints" / job.name)
        return join_root(self.checkpoint_root, self.folder.parent.name, self.folder.name, job.name)

    def _url(self, *parts: str) -> str | None:
        root = self.checkpoint_root
        if root is None or not is_url(root):
            return None
        return join_root(root, self.folder.parent.name, self.folder.name, *parts)
