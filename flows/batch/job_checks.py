"""Preflights of jobs in a process of their own, before a batch begins: a few samples, and a tiny step of each job."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ringmaster.errors import raise_faults
from ringmaster.flows import settings
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.profiling.preflight_runs import run_preflight
from ringmaster.techniques import Job, registry
from ringmaster.techniques.preflight_result import Preflight, PreflightOrder
from ringmaster.techniques.processes.forkserver_client import ForkServer


def check_jobs(batch: Batch) -> None:
    """Reads a few samples of each job on this machine, and takes one step with a small model of its class.

    Raises InputError with every fault.
    """
    # No shapes: the techniques are checked on the machine that will train the jobs.
    _, faults = preflights_of(batch, batch.jobs, shapes=())
    raise_faults([f"job {name}: {why}" for name, why in faults.items()])


def preflights_of(
    batch: Batch, jobs: Sequence[Job], **options: Any
) -> tuple[Mapping[str, Preflight], Mapping[str, str]]:
    """Returns the preflights of jobs of a batch, and why some have none. options: of the order."""
    order = PreflightOrder(
        jobs=tuple(jobs),
        techniques=registry.dotted_paths(),
        cache_dir=str(settings.home() / "cache"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        import_paths=(str(batch.folder),),
        **options,
    )
    preload = (f"transformers:{each.model.architecture}" for each in jobs if each.model.architecture)
    with ForkServer(preload=tuple(dict.fromkeys(preload))) as server:
        return run_preflight(order, server=server, notice=lambda _: None)
