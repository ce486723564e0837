"""A pool with unlike kinds of devices: each kind is profiled, and a plan assigns each job a kind."""

import os
from dataclasses import replace

import pytest

from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.pool.submissions import Submissions
from tests.cluster.checks import assert_well
from tests.cluster.faults.test_faults_of_parents import assert_done, batch_of, layouts_of
from tests.cluster.jobs import batch_file, profiles_of, torch_job
from tests.cluster.waiting import until


def kinds_of(pool):
    """Returns the kind of each node's devices, by node name."""
    nodes = NodeRegistry(pool.database).all()
    return {n.name: Cluster(nodes=(Node(name=n.name, devices=n.devices),)).device_kind() for n in nodes}


def restart(pool, name, *, cores):
    """Restarts the worker of a node, with a device of the given cores."""
    before = pool.serving()[name]
    pool.workers[name].terminate()
    pool.workers[name].wait()
    pool.nodes[name].cores = cores
    pool.start_worker(name)
    until("the node serves again", lambda: pool.serving().get(name, before) != before)


@pytest.fixture(scope="module")
def kinds(session_pool):
    """Makes the two nodes unlike: alpha's device has one core, beta's two. Yields the kinds by node name."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        pytest.skip("devices of a second kind have a second core, and this machine has one only")
    session_pool.heal()
    before = session_pool.nodes["beta"].cores
    restart(session_pool, "beta", cores=cores[:2])
    found = kinds_of(session_pool)
    assert found["alpha"] != found["beta"]
    yield found
    restart(session_pool, "beta", cores=before)


def assert_on_their_kind(pool, batch, kinds):
    """Asserts that each segment ran under an option for the kind of its devices."""
    for segment in pool.segments(batch):
        nodes = {device.partition(":")[0] for device in segment.spec.devices}
        assert {kinds[node] for node in nodes} == {segment.spec.device_type}


def test_each_kind_is_measured_and_what_is_planned_for_it_is_trained_on_it(pool, kinds, parents, bench, tmp_path):
    jobs = [torch_job(f"typed{i}", trace=pool.trace.file, num_steps=40, step_s=0.1) for i in range(3)]
    parent = parents("run", batch_file(tmp_path, "typed", jobs), "--checkpoint-every", 0.4)
    batch = batch_of(pool, "typed", parent)
    assert_done(parent)
    submission = Submissions(pool.database).find(batch)
    for job in jobs:
        assert {profile.device_type for profile in submission.profiles[job.name]} == set(kinds.values())
    assert_on_their_kind(pool, batch, kinds)
    pool.trace.note_trials(jobs, before_s=min(segment.started_s for segment in pool.segments(batch)))
    assert_well(pool, batch, jobs, bench, layouts=layouts_of(pool, batch))


def test_a_job_that_one_kind_alone_can_train_waits_for_it(pool, kinds, bench):
    """Two jobs need beta, which trains one after the other; alpha idles and takes neither."""
    wanted = {"for-alpha": "alpha", "for-beta": "beta", "also-for-beta": "beta"}
    jobs = [torch_job(name, trace=pool.trace.file, num_steps=30, step_s=0.1) for name in wanted]
    profiles = {
        job.name: tuple(replace(profile, device_type=kinds[wanted[job.name]]) for profile in profiles_of(job))
        for job in jobs
    }
    batch = pool.submit(jobs, profiles=profiles)
    pool.wait(batch)
    nodes = {pool.nodes[name].mark: name for name in kinds}
    for name, node in wanted.items():
        assert {nodes[step["node"]] for step in pool.trace.of(job=name)} == {node}
    assert_on_their_kind(pool, batch, kinds)
    assert_well(pool, batch, jobs, bench)
