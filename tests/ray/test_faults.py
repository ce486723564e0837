"""The head of a Ray cluster and the processes of a controller, each killed while a batch trains."""

import os
import signal
import time

import pytest

from tests.cluster.checks import assert_well
from tests.cluster.waiting import TIMEOUT_S, until
from tests.ray.conftest import MACHINES
from tests.ray.jobs import machine_of, running
from tests.ray.machines import HEAD_S

pytestmark = pytest.mark.full


def test_a_head_that_is_killed(pool, bench, recovered):
    """Jobs train on until Ray gives up its raylets; then the nodes leave in order, and come again with the head."""
    jobs, batch = running(pool, "near", "far")
    pids = {job.name: machine_of(pool, job.name)[1] for job in jobs}
    before_s = time.monotonic()
    pool.machines.kill_head()
    until(
        "the nodes have left",
        lambda: not any(pool.machines.processes_of(machine) for machine in MACHINES),
        seconds=TIMEOUT_S,
    )
    recovered(f"the head killed: raylets end after {HEAD_S} s, and nodes have left", time.monotonic() - before_s)
    for job in jobs:
        assert pool.trace.of(job=job.name, after_s=before_s + HEAD_S / 2), "it trained on without the head"
    back_s = time.monotonic()
    pool.machines.heal(MACHINES)
    for job in jobs:
        again = pool.trains(job.name, after_s=before_s, not_by=pids[job.name])
        recovered(f"the head started again, with two machines: {job.name} trains", again["s"] - back_s)
    pool.finish(batch)
    for job in jobs:
        assert len(pool.trace.of(job=job.name)) == job.num_steps, "every step is trained once, and no more"
    assert_well(pool, batch, jobs, bench)


def test_a_controller_that_is_killed(pool, bench, recovered):
    """The next controller finds the nodes and segments of the last one, and asks Ray for no more."""
    jobs, batch = running(pool, "up", "down")
    nodes, pids = pool.serving(), {job.name: machine_of(pool, job.name)[1] for job in jobs}
    epoch, before_s = pool.epoch(), time.monotonic()
    pool.executor.kill()
    pool.executor.wait()
    pool.start_executor()
    until("another controller leads", lambda: pool.epoch() > epoch, seconds=TIMEOUT_S)
    recovered("a controller killed and started again: it leads", time.monotonic() - before_s)
    pool.finish(batch)
    assert {step["pid"] for job in jobs for step in pool.trace.of(job=job.name)} == {*pids.values()}
    assert len(pool.segments(batch)) == len(jobs), "the segments were adopted"
    assert pool.serving() == nodes
    assert_well(pool, batch, jobs, bench)


def test_a_driver_of_ray_that_is_killed(pool, bench):
    """The controller starts it again, finds the nodes that it had, and gets another one for a machine that is lost."""
    jobs, batch = running(pool, "driven", "riding")
    os.kill(pool.broker().pid, signal.SIGKILL)
    machine, pid = machine_of(pool, "driven")
    before_s = time.monotonic()
    pool.machines.kill_raylet(machine)
    pool.machines.add(machine)
    until("two nodes serve", lambda: len(pool.serving()) == len(MACHINES), seconds=TIMEOUT_S)
    pool.trains("driven", after_s=before_s, not_by=pid)
    pool.finish(batch)
    assert_well(pool, batch, jobs, bench)


def test_a_node_whose_processes_are_all_killed(pool, bench, recovered):
    """Ray's machine says that none is left: the node is given up at once, and not only after its silence."""
    jobs, batch = running(pool, "lost", "spared")
    machine, pid = machine_of(pool, "lost")
    nodes, before_s = pool.serving(), time.monotonic()
    pool.machines.kill_node(machine)
    until("the node is given up", lambda: len(nodes.keys() & pool.serving().keys()) == 1, seconds=TIMEOUT_S)
    recovered("all processes of a node killed: the node is given up", time.monotonic() - before_s)
    (gone,) = nodes.keys() - pool.serving().keys()
    assert f"node {gone} is gone: The actor is dead because" in pool.log()
    again = pool.trains("lost", after_s=before_s, not_by=pid)
    recovered("all processes of a node killed: its job trains", again["s"] - before_s)
    pool.finish(batch)
    assert_well(pool, batch, jobs, bench)
