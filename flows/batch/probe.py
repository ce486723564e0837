"""A test step of each job of a batch before its submission, to reject jobs that cannot be trained."""

from __future__ import annotations

import os

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.reports.progress import current_view
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.profiling.preflight import run_preflight
from ringmaster.techniques import registry
from ringmaster.techniques.preflight import PreflightOrder
from ringmaster.techniques.processes.forkserver_client import ForkServer


def check_jobs(batch: Batch) -> None:
    """Reads a few samples of each job on this machine, and takes one step with a small model of its class.

    Raises InputError with every fault.
    """
    order = PreflightOrder(
        jobs=batch.jobs,
        shapes=(),  # the techniques are checked on the machine that will train the jobs
        techniques=registry.dotted_paths(),
        cache_dir=str(settings.home() / "cache"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        import_paths=(str(batch.folder),),
    )
    preload = tuple(f"transformers:{job.model.architecture}" for job in batch.jobs if job.model.architecture)
    with ForkServer(preload=tuple(dict.fromkeys(preload))) as server:
        _, faults = run_preflight(order, server=server, notice=current_view.get().notice)
    if faults:
        raise InputError(unfit(faults))


def unfit(faults: dict[str, str]) -> list[str]:
    """Returns the fault of each job as a line."""
    return [f"job {name}: {why}" for name, why in faults.items()]
