"""`ringmaster up --engine ray` without a cluster: one is started for this machine alone, and ends with the pool."""

import pytest

from ringmaster.flows.services.pool_processes import ServiceStatus
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.storage.database import Database
from tests.cluster.waiting import until
from tests.pool_home import Home
from tests.ports import free_port

OPTIONS = ["--engine", "ray", "--max-nodes", "1", "--idle", "8", "--node-devices", "cpu:1"]


@pytest.fixture
def home(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ringmaster-ml[ray]'")
    home = Home(tmp_path)
    port = free_port(but=[*home.ports, home.port_metrics])
    try:
        done = home.up(*OPTIONS, "--port-ray", str(port))
        assert done.returncode == 0, done.stderr
        yield home
    finally:
        home.down()
        home.wait_until_nobody_is_left()


# tests/cluster/engines/test_work_pool.py holds `up` with nodes that come and go, test_nodes.py nodes of Ray, and
# tests/unit/features/ray/test_head.py the head's command.
@pytest.mark.full
def test_a_node_comes_for_a_batch_and_is_given_back(home):
    until("Ray's head is up", lambda: home.states()["ray"].status == ServiceStatus.UP)
    database = Database(home.address().database)
    try:
        assert NodeRegistry(database).all() == []
        home.run_batch()
        until("the node is given back", lambda: NodeRegistry(database).all() == [])
    finally:
        database.close()
