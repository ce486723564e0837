"""A tiny step of each job of a batch before it is handed over, so that nobody waits for what cannot be trained."""

from __future__ import annotations

import os

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.flows.views import current_view
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.profiling.stage import run_survey
from ringmaster.techniques import registry
from ringmaster.techniques.engine.processes import ForkServer
from ringmaster.techniques.surveys import SurveyOrder


def check_jobs(batch: Batch) -> None:
    """Reads a few samples of each job on this machine and takes a step of a small model of its class.

    Raises InputError with every fault.
    """
    order = SurveyOrder(
        jobs=batch.jobs,
        shapes=(),  # what could train them is looked at where they will be trained
        techniques=registry.dotted_paths(),
        cache_dir=str(settings.home() / "cache"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        import_paths=(str(batch.folder),),
    )
    preload = tuple(f"transformers:{job.model.architecture}" for job in batch.jobs if job.model.architecture)
    with ForkServer(preload=tuple(dict.fromkeys(preload))) as server:
        _, faults = run_survey(order, server=server, notice=current_view.get().notice)
    if faults:
        raise InputError(unfit(faults))


def unfit(faults: dict[str, str]) -> list[str]:
    """What is wrong with each job, as a person is told of faults in the input."""
    return [f"job {name}: {why}" for name, why in faults.items()]
