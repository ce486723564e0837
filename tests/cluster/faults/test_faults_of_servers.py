"""Servers and executors that go down and return, while training continues."""

import os
import signal
import time

import psutil
import pytest

from tests.cluster.checks import assert_well
from tests.cluster.jobs import torch_job
from tests.cluster.machines import end
from tests.cluster.waiting import TIMEOUT_S, until
from tests.matrix import matrix

# A minute of downtime takes this long here; RINGMASTER_TEST_MINUTE_S=60 makes it a real minute.
MINUTE_S = float(os.environ.get("RINGMASTER_TEST_MINUTE_S", "8"))
SPARE_STEPS = 400  # of 0.25 s: trained until a server has stopped, which may take long


def trains_for(pool, job=None, *, seconds):
    """Waits until a job, or any job, has trained for `seconds`."""
    since_s = time.monotonic()
    until(
        f"{job or 'training'} continues",
        lambda: pool.trace.of(job=job, after_s=since_s + seconds),
        seconds=seconds + TIMEOUT_S,
    )


def test_prefects_server_is_down_for_a_minute(pool, bench, recovered):
    long = torch_job("through", trace=pool.trace.file, num_steps=int(4 * MINUTE_S) + SPARE_STEPS)
    later = torch_job("behind", trace=pool.trace.file, num_steps=20, step_s=0.1)
    batch = pool.submit([long])
    pool.wait_for_checkpoint(batch)
    pool.prefect.stop()
    second = pool.submit([later])
    trains_for(pool, "through", seconds=MINUTE_S)
    before_s = time.monotonic()
    pool.prefect.start()
    recovered("Prefect's server down: it is up again", time.monotonic() - before_s)
    for each in (batch, second):
        pool.finish(each)
    assert {segment.outcome.status for segment in pool.segments(batch)} == {"done"}
    begun_s = min(step["s"] for step in pool.trace.of(job="behind"))
    recovered("Prefect's server down: what waited for it trains, after its start", begun_s - before_s)
    assert_well(pool, batch, [long], bench)
    assert_well(pool, second, [later], bench)


@pytest.mark.parametrize("how", matrix(["fast", "immediate"], quick=["immediate"]))
def test_postgresql_is_restarted(pool, pool_postgresql, bench, recovered, how):
    jobs = [torch_job(f"{how}{i}", trace=pool.trace.file) for i in range(3)]
    batch = pool.submit(jobs)
    pool.wait_for_checkpoint(batch)
    before_s = time.monotonic()
    pool_postgresql.stop(how)
    trains_for(pool, seconds=1.0)
    pool_postgresql.start()
    up_s = time.monotonic()
    pool.finish(batch)
    recovered(f"PostgreSQL restarted ({how}), down for {up_s - before_s:.1f} s: all is done", time.monotonic() - up_s)
    assert_well(pool, batch, jobs, bench)


def test_postgresql_is_away_for_longer_than_nodes_may_be_unheard(pool, pool_postgresql, bench, recovered):
    """Ownership of devices becomes unknown: ranks are ended, and later resume from their checkpoints."""
    job = torch_job("unheard", trace=pool.trace.file)
    batch = pool.submit([job])
    pool.wait_for_checkpoint(batch)
    rank = pool.trace.of(job=job.name)[-1]["pid"]
    pool_postgresql.stop()
    until("its rank is ended", lambda: not psutil.pid_exists(rank))
    pool_postgresql.start()
    up_s = time.monotonic()
    pool.finish(batch)
    recovered("PostgreSQL away for longer than the fence: all is done", time.monotonic() - up_s)
    assert_well(pool, batch, [job], bench)


@pytest.mark.parametrize("number", matrix([signal.SIGKILL, signal.SIGTERM], quick=[signal.SIGKILL]))
def test_the_executor_ends_and_another_one_goes_on(pool, bench, recovered, number):
    job = torch_job(f"led-{int(number)}", trace=pool.trace.file)
    small = [torch_job(f"short{i}-{int(number)}", trace=pool.trace.file, num_steps=20, step_s=0.1) for i in range(2)]
    batch = pool.submit([job, *small])
    pool.wait_for_checkpoint(batch, job=job.name)
    before = {segment.id for segment in pool.segments(batch) if segment.job == job.name}
    epoch, before_s = pool.epoch(), time.monotonic()
    end(pool.executor, number=number)
    pool.start_executor()
    until("another one leads", lambda: pool.epoch() > epoch)
    recovered(f"a controller gets {number.name}: the next one leads", time.monotonic() - before_s)
    pool.finish(batch)
    assert {s.id for s in pool.segments(batch) if s.job == job.name} == before, "what ran was adopted, not doubled"
    assert_well(pool, batch, [job, *small], bench)
