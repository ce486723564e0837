"""Orders to worker processes: one immutable order for each gang, in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringmaster.codec import digest, stored_as, to_json
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import FirstCheckpoint
from ringmaster.techniques.job_specs import DataSpec

TRAIN, TRIAL, EVALUATE = "train", "trial", "evaluate"
KEPT_CHECKPOINTS = 2


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

    purpose: "train", from the newest checkpoint up to step `last_step`; "trial", a few steps from fresh weights; or
        "evaluate", the metrics of a finished model.
    technique: the dotted path of its class.
    data: the JSON form of the `PreparedData` from the preflight; data that has changed since is refused. None accepts
        the present data.
    folder: this gang's own scratch folder (rendezvous, logs).
    cache_dir: the folder of prepared data.
    checkpoint_dir: where checkpoints are read and written, a folder or an fsspec URL.
    model_dir: the folder that the finished model is exported to.
    model_url: where the finished model is stored as well, for machines without that folder; None where all have it.
    weights_from: a folder with the safetensors of the base model, or None.
    starts_from: the checkpoints of the job of the batch from which the job continues, or None.
    parents: folders of the available models that the job is derived from, by the names that the job uses.
    model_urls: where models are stored, by their folder in `weights_from` and `parents`, for machines without it.
    known_step: a step of which a checkpoint is known to have been stored. If no checkpoint at all is found then, the
        gang fails instead of starting again from step 0.
    checkpoint_every_s: seconds between checkpoints; None for the last one only.
    digested_steps: the steps after which the state is digested, of a job whose work is verified; empty for as
        many as fit into a share of the time.
    import_paths: folders appended to the workers' import path, which contain users' factories.
    members: orders of the jobs that the same gang trains together with `job` on one base (`techniques.shared_base`).
        Only their job, data, folders and last step are used.
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
    starts_from: str | None = stored_as("warm_start_from", default=None)
    parents: Mapping[str, str] = field(default_factory=dict)
    model_urls: Mapping[str, str] = field(default_factory=dict)
    last_step: int = 0
    known_step: int = 0
    checkpoint_every_s: float | None = None
    digested_steps: tuple[int, ...] = ()
    keep_checkpoints: int = KEPT_CHECKPOINTS
    import_paths: tuple[str, ...] = ()
    members: tuple[GangOrder, ...] = stored_as("fellows", default=())
    ordered_at_s: float = 0.0
    collective_timeout_s: float = 1800.0
    first_rank: int = 0
    num_ranks_in_all: int = 0
    meeting: str = ""

    @property
    def data_spec(self) -> DataSpec:
        """The job's data; a store that a job of the same batch has made is read in the folder that `parents` has."""
        store = self.job.data.store or ""
        return self.job.data.reading(store=self.parents[store]) if store in self.parents else self.job.data

    @property
    def first_checkpoint(self) -> FirstCheckpoint | None:
        """The checkpoint of another job from which the job continues, with the place of that job's checkpoints."""
        start = self.job.started_from
        return start and replace(start, checkpoints=self.starts_from or start.checkpoints)

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


def rank_argument(order: GangOrder, *, rank: int) -> dict[str, Any]:
    """Returns the JSON form of one rank's order, which `worker.main` reads."""
    return {**to_json(order), "rank": rank}
