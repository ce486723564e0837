"""Orders to worker processes: one immutable order for each gang, in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.codec import digest, stored_as
from ringmaster.techniques.job import Job

TRAIN, TRIAL = "train", "trial"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One device as a worker sees it: a GPU by its index and uuid, or the CPU cores that the process is pinned to."""

    kind: str
    index: int
    uuid: str = ""
    cores: tuple[int, ...] = ()
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class GangOrder:
    """An order to train (or try) `job` on `slots` with one technique and config.

    purpose: "train", from the newest checkpoint up to step `last_step`; or "trial", a few steps from fresh weights.
    technique: the dotted path of its class.
    data: the JSON form of the `PreparedData` from the preflight; data that has changed since is refused. None accepts
        the present data.
    folder: this gang's own scratch folder (rendezvous, logs).
    cache_dir: the folder of prepared data.
    checkpoint_dir: where checkpoints are read and written, a folder or an fsspec URL.
    model_dir: the folder that the finished model is exported to.
    model_url: where the finished model is stored as well, for machines without that folder; None where all have it.
    weights_from: a folder with the safetensors of the base model, or None.
    parents: folders of the available models that the job is derived from, by the names that the job uses.
    model_urls: where models are stored, by their folder in `weights_from` and `parents`, for machines without it.
    known_step: a step of which a checkpoint is known to have been stored. If no checkpoint at all is found then, the
        gang fails instead of starting again from step 0.
    checkpoint_every_s: seconds between checkpoints; None for the last one only.
    import_paths: folders appended to the workers' import path, which contain users' factories.
    members: orders of the jobs that the same gang trains beside `job` on one base (`techniques.shared_base`). Only
        their job, data, folders and last step are used.
    ordered_at_s: CLOCK_MONOTONIC when the order was given; start-up time is counted from it.
    first_rank, num_ranks_in_all, meeting: only for a gang over several machines, whose `slots` are those of this
        machine. Its ranks here are `first_rank` and the following ones of `num_ranks_in_all`. All ranks meet at
        `meeting`, "host:port" on the machine of rank 0, which is empty where one machine has all ranks.
    """

    purpose: str
    job: Job
    technique: str
    config: Mapping[str, Any]
    slots: tuple[Slot, ...]
    folder: str
    cache_dir: str
    data: Mapping[str, Any] | None = None
    checkpoint_dir: str | None = None
    model_dir: str | None = None
    model_url: str | None = None
    weights_from: str | None = None
    parents: Mapping[str, str] = field(default_factory=dict)
    model_urls: Mapping[str, str] = field(default_factory=dict)
    last_step: int = 0
    known_step: int = 0
    checkpoint_every_s: float | None = None
    keep_checkpoints: int = 2
    import_paths: tuple[str, ...] = ()
    members: tuple[GangOrder, ...] = stored_as("fellows", default=())
    ordered_at_s: float = 0.0
    collective_timeout_s: float = 1800.0
    first_rank: int = 0
    num_ranks_in_all: int = 0
    meeting: str = ""

    @property
    def num_devices(self) -> int:
        """The number of devices of the whole gang. A gang over several machines has one rank for each device."""
        return self.num_ranks_in_all if self.meeting else len(self.slots)

    @property
    def attempt(self) -> str:
        """An identifier that the ranks of this gang share, and that differs for another try of the same order."""
        return digest([self.folder, self.meeting or self.ordered_at_s])


def rendezvous(order: GangOrder) -> Path:
    """Returns the file through which a gang's ranks find each other."""
    return Path(order.folder).resolve() / "rendezvous"
