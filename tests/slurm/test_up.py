"""`ringmaster up --engine slurm`, as a person walks through it: from nothing to a trained batch."""

import json
import os
import shlex
import sys

import pytest

from tests.cluster.machines import SOURCE
from tests.cluster.stubs import NODE
from tests.cluster.waiting import until
from tests.pool_home import END_TIMEOUT_S, UP_TIMEOUT_S, Home
from tests.slurm.pools import collections_plugin

STUBS = "tests.cluster.stubs"

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture
def folder(cluster, tmp_path):
    """A home without a pool."""
    home = Home(tmp_path)
    home.environment |= {
        **cluster.environment,
        NODE: "any",  # the slow jobs write it down
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE / "src"), str(collections_plugin(tmp_path))]),
    }
    return home


@pytest.fixture
def home(folder, pool_postgresql):
    home = folder
    options = ("--engine", "slurm", "--max-nodes", "2", "--node-devices", "cpu:2", "--time", "2h", "--idle", "5")
    try:
        done = home.up("--database", pool_postgresql.create("up"), "--partition", "batch", *options)
        assert done.returncode == 0, done.stderr
        yield home
    finally:
        home.down()


def slow_batch(folder):
    """Writes a batch of four jobs that train for a minute and a half each; returns the file."""
    jobs = [
        {
            "name": f"slow-{number}",
            "model": {
                "factory": f"{STUBS}:slow",
                "kwargs": {"job": f"slow-{number}", "trace": str(folder / "trace"), "step_s": 0.3},
            },
            "data": {"factory": f"{STUBS}:points"},
            "loss": f"{STUBS}:cross_entropy",
            "global_batch_size": 8,
            "num_steps": 300,
        }
        for number in range(4)
    ]
    file = folder / "slow.yaml"
    file.write_text(json.dumps({"name": "slow", "jobs": jobs}))  # JSON is YAML
    return file


def trained(home, file):
    """Trains a batch, all jobs of which have to end well."""
    done = home.ringmaster("run", str(file), "--json")
    assert done.returncode == 0, done.stderr
    assert {job["status"] for job in json.loads(done.stdout)["jobs"]} == {"done"}


def test_batches_are_trained_on_as_many_nodes_as_they_are_worth_and_those_are_given_back(cluster, home, tmp_path):
    earlier = {job.id for job in cluster.slurm.jobs()}

    def jobs_of_nodes():
        return [job for job in cluster.slurm.jobs() if job.flow_run and job.id not in earlier]

    assert not jobs_of_nodes(), "no node is requested before there is work"
    trained(home, SOURCE / "examples" / "tiny_batch.yaml")
    assert jobs_of_nodes()
    trained(home, slow_batch(tmp_path))
    jobs = jobs_of_nodes()
    assert {job.node for job in jobs} == set(cluster.nodes), "six minutes of work are worth both nodes"
    until("the nodes are given back", lambda: all(cluster.is_over(job.id) for job in jobs))
    assert {cluster.job(job.id).state for job in jobs} == {"COMPLETED"}


def test_a_pool_in_a_job_of_its_own_trains_on_other_jobs_and_ends_in_order(cluster, folder, pool_postgresql):
    words = [sys.executable, "-m", "ringmaster.flows.entry", *folder.up_words(), "--wait"]
    words += ["--database", pool_postgresql.create("up_in_a_job"), "--engine", "slurm", "--max-nodes", "1"]
    words += ["--node-devices", "cpu:2", "--time", "2h", "--idle", "5"]
    names = ("RINGMASTER_HOME", "PYTHONPATH", *cluster.environment)
    exports = [f"export {name}={shlex.quote(folder.environment[name])}" for name in names]
    script = "\n".join(["#!/bin/sh", *exports, f"exec {shlex.join(words)}", ""])
    job = cluster.submit("--nodelist=n1", "--exclusive", "--time=60", script=script)
    try:
        until(f"the pool is up\n{cluster.output(job)}", (folder.folder / "pool.json").exists, seconds=UP_TIMEOUT_S)
        trained(folder, SOURCE / "examples" / "tiny_batch.yaml")
        nodes = [each for each in cluster.slurm.jobs() if each.flow_run and each.id > job]
        assert {each.node for each in nodes} == {"n2"}
        until("the nodes are given back", lambda: all(cluster.is_over(each.id) for each in nodes))
        assert "RUNNING" in cluster.job(job).states
        cluster.slurm.end(job)
        until("the job is over", lambda: cluster.is_over(job), seconds=END_TIMEOUT_S)
        assert "COMPLETED" in cluster.job(job).states, cluster.output(job)
        assert "the pool is down" in cluster.output(job)
        folder.wait_until_nobody_is_left()
    finally:
        folder.down()
