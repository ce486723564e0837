"""An upgrade of a pool while jobs run, as in docs/operations.md: jobs resume from their checkpoints."""

import os
import signal
import time
from itertools import pairwise

import pytest

from tests.cluster.checks import assert_well
from tests.cluster.jobs import torch_job
from tests.cluster.machines import end
from tests.cluster.waiting import TIMEOUT_S, until

NEWER = "9.0.0"
REFUSED = 2  # the exit code of invalid requests


@pytest.fixture
def newer(pool, tmp_path):
    """The environment of processes that report a newer release."""
    folder = tmp_path / "newer" / f"ringmaster_ml-{NEWER}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ringmaster-ml\nVersion: {NEWER}\n")
    before = pool.environment
    path = os.pathsep.join([str(folder.parent), before["PYTHONPATH"]])
    yield {**before, "PYTHONPATH": path}
    pool.environment = before  # restores the release, so that later workers are accepted
    for worker in pool.workers.values():
        end(worker)
    end(pool.executor)


def leave(worker):
    """Ends a worker gracefully."""
    worker.send_signal(signal.SIGTERM)
    return worker.wait(timeout=TIMEOUT_S)


def test_a_pool_is_upgraded_with_jobs_running(pool, newer, bench, recovered):
    jobs = [torch_job(name, trace=pool.trace.file) for name in ("upgraded", "likewise")]
    batch = pool.submit(jobs)
    for job in jobs:
        pool.wait_for_checkpoint(batch, job=job.name)
    older, began_s = pool.environment, time.monotonic()
    assert leave(pool.workers["alpha"]) == 0
    end(pool.executor)
    pool.environment = newer
    pool.start_executor()
    # The other worker was not upgraded: it reports this, and leaves in order.
    said = f"the pool's controller is of Ringmaster {NEWER}, and this machine has "
    assert pool.workers["beta"].wait(timeout=TIMEOUT_S) == REFUSED
    assert said in pool.tail("beta").replace("\n", " ")
    # One machine was not upgraded: its worker is refused.
    pool.environment = older
    assert pool.start_worker("alpha").wait(timeout=TIMEOUT_S) == REFUSED
    assert said in pool.tail("alpha").replace("\n", " ")
    until("nobody serves", lambda: not pool.serving())
    pool.environment = newer
    for name in ("alpha", "beta"):
        pool.start_worker(name)
    upgraded_s = time.monotonic()
    for job in jobs:
        pool.trains(job.name, after_s=upgraded_s)
    recovered("a pool upgraded: its jobs train again, after the stop", time.monotonic() - began_s)
    pool.finish(batch)
    for job in jobs:
        segments = [segment for segment in pool.segments(batch) if segment.job == job.name]
        assert [segment.outcome.status for segment in segments[:-1]] == ["preempted"] * (len(segments) - 1)
        assert all(after.spec.first_step == before.outcome.step for before, after in pairwise(segments))
        assert len(pool.trace.of(job=job.name)) == job.num_steps, "every step is trained once, and no more"
    assert_well(pool, batch, jobs, bench)
