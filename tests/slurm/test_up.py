"""`ringmaster up --engine slurm`, as a person walks through it: from nothing to a trained batch."""

import json
import os

import pytest

from tests.cluster.machines import SOURCE
from tests.cluster.waiting import until
from tests.pool_home import Home
from tests.slurm.pools import collections_plugin

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture
def home(cluster, pool_postgresql, tmp_path):
    home = Home(tmp_path)
    home.environment |= {
        **cluster.environment,
        "PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(collections_plugin(tmp_path))]),
    }
    options = ("--engine", "slurm", "--max-nodes", "2", "--node-devices", "cpu:2", "--time", "2h", "--idle", "5")
    try:
        done = home.up("--database", pool_postgresql.create("up"), "--partition", "batch", *options)
        assert done.returncode == 0, done.stderr
        yield home
    finally:
        home.down()


def test_a_batch_is_trained_on_nodes_that_slurm_lends_and_they_are_given_back(cluster, home):
    assert not [job for job in cluster.slurm.jobs() if job.flow_run], "no node is requested before there is work"
    done = home.ringmaster("run", str(SOURCE / "examples" / "tiny_batch.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    assert {job["status"] for job in json.loads(done.stdout)["jobs"]} == {"done"}
    jobs = [job for job in cluster.slurm.jobs() if job.flow_run]
    assert jobs
    until("the nodes are given back", lambda: all(cluster.is_over(job.id) for job in jobs))
    assert {cluster.job(job.id).state for job in jobs} == {"COMPLETED"}
