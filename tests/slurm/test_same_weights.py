"""The same batch file on every engine: this machine, workers, Slurm and Ray train the same weights, bit for bit.

Each job has one device and one config, so all gangs are equal. Where Ray is not installed, its part is skipped.
"""

import json
import os
import re
from importlib.util import find_spec

import pytest

from ringmaster.flows.services.pool_processes import ServiceStatus
from ringmaster.flows.settings import EXAMPLES
from ringmaster.tasks.cluster import cpu_slots
from tests.cluster.machines import SOURCE
from tests.integration.workbench import is_bit_equal, weights_in
from tests.pool_home import Home
from tests.ports import free_port
from tests.slurm.pools import collections_plugin

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

LENT = ["--max-nodes", "1", "--idle", "5", "--node-devices", f"cpu:{len(cpu_slots())}"]


@pytest.fixture(scope="module")
def batch_file(tmp_path_factory):
    """The example, with jobs that leave the planner no choice: trials of short jobs measure one config a technique."""
    text = (EXAMPLES / "tiny_batch.yaml").read_text()
    fixed, num_jobs = re.subn(r"(?m)^( +)num_steps: .*$", r"\g<0>\n\1techniques: [single]\n\1num_devices: [1]", text)
    assert num_jobs == 3
    file = tmp_path_factory.mktemp("batch") / "tiny.yaml"
    file.write_text(fixed)
    return file


def trained(home, batch_file):
    """Trains the batch; returns by job the options of its segments, and its weights."""
    done = home.ringmaster("run", str(batch_file), "--json")
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    assert [job["status"] for job in jobs] == ["done"] * 4
    kinds = ("technique", "config", "num_devices")
    options = {job["name"]: [[segment[kind] for kind in kinds] for segment in job["segments"]] for job in jobs}
    return options, {job["name"]: weights_in(home.folder / job["model_dir"]) for job in jobs}


@pytest.fixture(scope="module")
def reference(batch_file, tmp_path_factory):
    return trained(Home(tmp_path_factory.mktemp("local")), batch_file)


@pytest.fixture(params=["workers", "slurm", "ray"])
def pool(request, tmp_path):
    """A pool of an engine, and the service that only this engine has."""
    home, name = Home(tmp_path), request.param
    if name == "workers":
        options, own = ["--engine", "workers"], "worker"
    elif name == "slurm":
        cluster, postgresql = (request.getfixturevalue(fixture) for fixture in ("cluster", "pool_postgresql"))
        paths = [str(SOURCE / "src"), str(collections_plugin(tmp_path))]
        home.environment |= {**cluster.environment, "PYTHONPATH": os.pathsep.join(paths)}
        options, own = ["--engine", "slurm", "--database", postgresql.create("same-weights"), *LENT], "slurm"
    else:
        if find_spec("ray") is None:
            pytest.skip("Ray is not installed: pip install 'ringmaster-ml[ray]'")
        port = free_port(but=[*home.ports, home.port_metrics])
        options, own = ["--engine", "ray", "--port-ray", str(port), *LENT], "ray"
    try:
        done = home.up(*options)
        assert done.returncode == 0, done.stderr
        assert home.states()[own].status == ServiceStatus.UP
        yield home
    finally:
        home.down()
        home.wait_until_nobody_is_left()


def test_every_engine_trains_the_same_weights(pool, reference, batch_file):
    options, weights = trained(pool, batch_file)
    wanted_options, wanted = reference
    assert options == wanted_options, "otherwise equal bits would be by chance"
    assert {name: is_bit_equal(weights[name], wanted[name]) for name in wanted} == dict.fromkeys(wanted, True)
