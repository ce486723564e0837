"""The jobs of the tests with Ray."""

from tests.cluster.jobs import torch_job
from tests.ray.conftest import MACHINES


def running(pool, *names):
    """Returns jobs that train and have checkpoints, and their batch."""
    jobs = [torch_job(name, trace=pool.trace.file) for name in names]
    batch = pool.submit(jobs)
    for job in jobs:
        pool.wait_for_checkpoint(batch, job=job.name)
    return jobs, batch


def machine_of(pool, job):
    """Returns the machine that trains a job, and the id of the process."""
    step = pool.trace.of(job=job)[-1]
    return next(mark for mark in MACHINES if step["node"].startswith(f"{mark}-")), step["pid"]
