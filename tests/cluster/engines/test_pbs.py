"""`ringmaster up --engine pbs`, by commands of PBS that start real processes: nodes are jobs that come and go."""

import os

import pytest

from tests.cluster.machines import SOURCE
from tests.cluster.waiting import until
from tests.pbs_site import Site
from tests.pool_home import Home
from tests.slurm.pools import collections_plugin

OPTIONS = ["--engine", "pbs", "--max-nodes", "2", "--node-devices", "cpu:1", "--time", "2h", "--idle", "8"]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "bin")


@pytest.fixture
def home(tmp_path, postgresql, site):
    home = Home(tmp_path)
    home.environment |= {
        "PATH": f"{site.folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE / "src"), str(collections_plugin(tmp_path))]),
    }
    try:
        done = home.up(*OPTIONS, "--queue", "gpu", "--database", postgresql.url("pbs"))
        assert done.returncode == 0, done.stderr
        yield home
    finally:
        home.down()
        home.wait_until_nobody_is_left()


@pytest.mark.full
def test_nodes_are_jobs_that_come_for_a_batch_and_are_given_back(home, site):
    assert site.jobs() == {}, "no node is requested before there is work"
    home.run_batch(logs=site.folder.glob("*.log"))
    assert all("-q gpu" in " ".join(job["words"]) for job in site.jobs().values())
    ended = until("the nodes are given back", lambda: all((site.state / f"{n}.status").exists() for n in site.jobs()))
    assert ended and {(site.state / f"{n}.status").read_text() for n in site.jobs()} == {"0\n"}, "in order"
