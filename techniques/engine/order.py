"""What a worker process is told to do: one immutable order a gang, in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.techniques.job import Job
from ringmaster.techniques.values import digest

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
    """Train (or try) `job` on `slots` with one technique and config.

    purpose: "train", from the newest checkpoint up to step `last_step`; or "trial", a few steps from fresh weights.
    technique: the dotted path of its class.
    data: the JSON form of the `PreparedData` that the job was surveyed with: content that has changed since is refused;
        None takes what is there.
    folder: this gang's own scratch folder (rendezvous, logs). cache_dir: prepared data.
    checkpoint_dir: where checkpoints are read and written, a folder or an fsspec URL.
    model_dir: where the finished model is exported.
    weights_from: a folder with the safetensors of the base model, or None. parents: folders of all models that the job
        comes from, as far as they are there, by the names under which it knows them.
    known_step: of which a checkpoint is known to have been kept; where none at all is found then, the gang fails rather
        than begin again from nothing.
    checkpoint_every_s: seconds between checkpoints; None for none but the last.
    import_paths: folders appended to the workers' import path, where users' factories are.
    fellows: orders of the jobs that the same gang trains beside `job` on one base (`techniques.shared_base`); of each
        counts what is its own: job, data, folders, last step.
    ordered_at_s: CLOCK_MONOTONIC when the order was given, from which start-up is counted.
    first_rank, num_ranks_in_all, meeting: of a gang over several machines, whose `slots` are those of this machine. Its
        ranks are `first_rank` and the following ones of `num_ranks_in_all`, and meet at "host:port", on the machine of
        rank 0. Empty where one machine has all ranks.
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
    weights_from: str | None = None
    parents: Mapping[str, str] = field(default_factory=dict)
    last_step: int = 0
    known_step: int = 0
    checkpoint_every_s: float | None = None
    keep_checkpoints: int = 2
    import_paths: tuple[str, ...] = ()
    fellows: tuple[GangOrder, ...] = ()
    ordered_at_s: float = 0.0
    collective_timeout_s: float = 1800.0
    first_rank: int = 0
    num_ranks_in_all: int = 0
    meeting: str = ""

    @property
    def num_devices(self) -> int:
        """Of the whole gang. One over several machines has a rank for each device."""
        return self.num_ranks_in_all if self.meeting else len(self.slots)

    @property
    def attempt(self) -> str:
        """A word that the ranks of this gang share, and those of another try of the same order do not."""
        return digest([self.folder, self.meeting or self.ordered_at_s])


def rendezvous(order: GangOrder) -> Path:
    """The file through which a gang's ranks find each other."""
    return Path(order.folder).resolve() / "rendezvous"
