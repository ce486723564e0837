"""The orders that gangs of segments receive."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.execution.checkpoint_interval import checkpoint_interval_s
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.profiling.trials import slots_of
from ringmaster.techniques import Job, Profile, registry
from ringmaster.techniques.processes.order import TRAIN, GangOrder


def gang_order(
    job: Job,
    segment: PlannedSegment,
    profile: Profile,
    *,
    place: RunPaths,
    devices: Sequence[Device],
    number: int,
    listed: Collection[str] = (),
) -> GangOrder:
    """Returns the order to train a job on a segment's devices under a profile.

    job, listed: by their names within the batch. `listed` holds those of the job's parents that are jobs of the batch.
    number: the segment's number in the journal.
    """
    parents = {name: place.model_dir(name) if name in listed else place.weights.get(name) for name in job.parents}
    if job.base is not None and parents[job.base] is None:
        parents[job.base] = place.weights.get(job.name)
    weights = parents[job.base] if job.base is not None else None
    urls = {
        str(folder): place.model_url(name) if name in listed else place.weights_url(folder)
        for name, folder in parents.items()
        if folder
    }
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
        model_url=place.model_url(job.name),
        model_urls={folder: url for folder, url in urls.items() if url},
        weights_from=str(weights) if weights else None,
        # Only an adaptation reads all parents.
        parents={name: str(p) for name, p in parents.items() if p} if job.adaptation is not None else {},
        last_step=segment.last_step,
        checkpoint_every_s=every_s,
        import_paths=place.import_paths,
        ordered_at_s=time.monotonic(),
    )


def called(job: str, members: Collection[str]) -> str:
    """Returns a short name for a job and the members that are trained with it."""
    return f"{job} and {len(members)} more" if members else job


def gang_folder(place: RunPaths, *, number: int, job: str) -> Path:
    """Returns the folder of a segment's gang, which holds its logs."""
    return place.folder / "gangs" / f"{number:04d}-{job}"
