"""Where a batch runs and what it leaves there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.cluster import Cluster, Device
from tasks.execution.dispatch import DeviceId
from tasks.execution.leases import Leases
from techniques import Job
from techniques.engine.places import join_root


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The devices, folders and leases of one run of a batch.

    folder: of this run: checkpoints, models, gang logs. weights: folders of base models that are not in the batch, by
    job. data: the prepared data of each job, as it was surveyed. checkpoint_every_s: None for what the cost of a save
    and the failure rate suggest. checkpoint_root: where checkpoints go instead of `folder`, a folder or an fsspec URL.
    """

    cluster: Cluster
    folder: Path
    cache_dir: Path
    leases: Leases
    holder: str
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

    def device(self, device: DeviceId) -> Device:
        """The device of that node and number."""
        node = next(node for node in self.cluster.nodes if node.name == device[0])
        return node.devices[device[1]]
