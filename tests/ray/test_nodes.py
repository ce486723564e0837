"""A batch on nodes that Ray lends, where a machine's raylet is killed."""

import time

from tests.cluster.checks import assert_well
from tests.cluster.waiting import TIMEOUT_S, until
from tests.ray.conftest import MACHINES
from tests.ray.jobs import machine_of, running


def test_two_jobs_train_on_two_machines_of_ray_and_one_leaves_a_raylet_that_is_killed(pool, bench, recovered):
    """The node leaves in order, with a checkpoint, and its job continues where Ray has a machine."""
    asked_s = time.monotonic()
    jobs, batch = running(pool, "left", "right")
    for job in jobs:
        recovered(f"nodes requested: {job.name} trains", pool.trace.of(job=job.name)[0]["s"] - asked_s)
    assert {machine_of(pool, job.name)[0] for job in jobs} == set(MACHINES)
    machine, pid = machine_of(pool, "left")
    before_s = time.monotonic()
    pool.machines.kill_raylet(machine)
    until("its processes have ended", lambda: not pool.machines.processes_of(machine), seconds=TIMEOUT_S)
    recovered("a raylet killed: its node has left", time.monotonic() - before_s)
    pool.machines.add(machine)
    again = pool.trains("left", after_s=before_s, not_by=pid)
    recovered("a raylet killed, and a machine added: its job trains", again["s"] - before_s)
    pool.finish(batch)
    assert len(pool.trace.of(job="left")) == jobs[0].num_steps, "every step is trained once, and no more"
    assert_well(pool, batch, jobs, bench)
