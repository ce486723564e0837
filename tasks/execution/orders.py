"""What a segment's gang is told to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.execution.cadence import checkpoint_interval_s
from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment
from ringmaster.tasks.execution.workplace import Workplace
from ringmaster.tasks.profiling.trials import slots_of
from ringmaster.techniques import Job, Profile, registry
from ringmaster.techniques.engine.gang import Event, Outcome
from ringmaster.techniques.engine.order import TRAIN, GangOrder

LOST, CANCELLED = "lost", "cancelled"
"""Outcomes beside those of a gang itself: its node is gone; a person cancelled its run, and it checkpointed."""


@dataclass(frozen=True, kw_only=True)
class SegmentCall:
    """All that a segment's task needs: the gang's order, its ranks, and where its events go.

    number: of the segment in the journal. job: as the executor calls it, in a pool "BATCH/JOB". batch: empty where
    there is no pool. devices: of the order's slots, in their order.
    """

    label: str
    order: GangOrder
    num_ranks: int
    on_event: Callable[[Event], None]
    number: int
    job: str
    batch: str
    devices: tuple[DeviceId, ...]


Submit = Callable[[SegmentCall], "Future[Outcome]"]
"""Starts a segment in the background; the future's `add_done_callback` and `result` are used."""


def gang_order(
    job: Job,
    segment: PlannedSegment,
    profile: Profile,
    *,
    place: Workplace,
    devices: Sequence[Device],
    number: int,
    listed: Collection[str] = (),
) -> GangOrder:
    """The order to train a job on a segment's devices under a profile; number: of the segment in the journal.

    job, listed: as their batch knows them. listed: those of the models that it comes from which are jobs of the batch.
    """
    parents = {name: place.model_dir(name) if name in listed else place.weights.get(name) for name in job.parents}
    if job.base is not None and parents[job.base] is None:
        parents[job.base] = place.weights.get(job.name)
    weights = parents[job.base] if job.base is not None else None
    stall_s = profile.save_s if profile.stall_s is None else profile.stall_s
    every_s = place.checkpoint_every_s or checkpoint_interval_s(stall_s, num_devices=profile.num_devices)
    return GangOrder(
        purpose=TRAIN,
        job=job,
        technique=registry.dotted_path(profile.technique),
        config=profile.config,
        slots=slots_of(devices),
        folder=str(gang_folder(place, number=number, job=job.name)),
        cache_dir=str(place.cache_dir),
        data=place.data.get(job.name),
        checkpoint_dir=place.checkpoint_dir(job),
        model_dir=str(place.model_dir(job.name)),
        weights_from=str(weights) if weights else None,
        # Only an adaptation reads them all.
        parents={name: str(p) for name, p in parents.items() if p} if job.adaptation is not None else {},
        last_step=segment.last_step,
        checkpoint_every_s=every_s,
        import_paths=place.import_paths,
        ordered_at_s=time.monotonic(),
    )


def called(job: str, fellows: Collection[str]) -> str:
    """A job with those that are trained beside it, in few words."""
    return f"{job} and {len(fellows)} more" if fellows else job


def gang_folder(place: Workplace, *, number: int, job: str) -> Path:
    """Where the gang of a segment keeps its logs; it names the gang, too."""
    return place.folder / "gangs" / f"{number:04d}-{job}"
