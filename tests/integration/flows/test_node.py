"""A node's process that receives a signal to end while it starts. Prefect is unreachable: stopping does not need it."""

import signal
import threading

import pytest

pytest.importorskip("prefect")

from prefect.settings import PREFECT_API_URL, temporary_settings

from ringmaster.errors import ReleaseMismatch
from ringmaster.flows.interrupts import stop_signals
from ringmaster.flows.pool import node
from ringmaster.flows.pool.node import _serve
from ringmaster.flows.pool.own_node import NodeOptions
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.storage import schema
from ringmaster.tasks.storage.database import Database, file_url
from tests.ports import free_port
from tests.unit.pool.node.test_agent import DEVICES, Site


def test_a_node_that_is_told_to_end_as_soon_as_it_is_registered_leaves_the_pool(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    api, said = f"http://127.0.0.1:{free_port()}/api", []
    pool = PoolAddress(database=database.url, prefect_api=api, mlflow_uri="http://m")
    cluster = Cluster(nodes=(Node(name="n", devices=DEVICES),))
    options = NodeOptions(home=tmp_path, pool=pool, name="n", cluster=cluster, drain_s=5.0)
    stopping = threading.Event()
    with temporary_settings({PREFECT_API_URL: api}), stop_signals(stopping.set):
        site = Site(database)
        assert [node.name for node in site.nodes.all()] == ["n"]
        signal.raise_signal(signal.SIGTERM)
        _serve(site.host, options, said.append, stopping, database)
    assert said[-1] == "node n has left the pool"
    assert site.nodes.all() == []
    database.close()


def test_a_worker_that_an_upgrade_has_forgotten_is_told_to_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "RELEASE_EVERY_S", 0.01)
    database, told = Database(file_url(tmp_path / "pool.db"), synced=False), threading.Event()
    database.write(schema.note_release)

    def serve():
        with node._watched_release(database, stop=told.set):
            assert not told.is_set()
            with monkeypatch.context() as newer:
                newer.setattr(schema, "own_release", lambda: "9.0")
                database.write(schema.note_release)
            assert told.wait(120)

    with pytest.raises(ReleaseMismatch, match=r"controller is of Ringmaster 9.0, and this machine has .*To fix"):
        serve()
    database.close()
