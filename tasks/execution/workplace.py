"""Where a batch runs and what it leaves there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.techniques import Job
from ringmaster.techniques.engine.places import join_root


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The folders of one run of a batch, and what its workers need to find there.

    folder: of this run: checkpoints, models, gang logs. weights: folders of models that are not in the batch: of bases
    by the job that adapts them, of others that jobs come from by the name that they are given. data: the prepared data
    of each job, as it was surveyed. checkpoint_every_s: None for what the cost of a save and the failure rate suggest.
    checkpoint_root: where checkpoints go instead of `folder`, a folder or an fsspec URL.
    """

    folder: Path
    cache_dir: Path
    import_paths: tuple[str, ...] = ()
    weights: Mapping[str, Path] = field(default_factory=dict)
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checkpoint_every_s: float | None = None
    checkpoint_root: str | None = None

    def model_dir(self, job: str) -> Path:
        """Where the finished model of a job is written."""
        return self.folder / "models" / job

    def checkpoint_dir(self, job: Job) -> str:
        """Where the checkpoints of a job are: a folder or a URL; always a folder where a command writes them."""
        if self.checkpoint_root is None or job.model.command is not None:
            return str(self.folder / "checkpoints" / job.name)
        return join_root(self.checkpoint_root, self.folder.parent.name, self.folder.name, job.name)
