from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster.techniques.processes.forkserver_client import ForkServer
from tests.cluster.conftest import PATIENCE, RECOVERIES, pool_postgresql, prefect, pytest_terminal_summary, recovered
from tests.integration.workbench import Workbench
from tests.slurm.cluster import SlurmCluster
from tests.slurm.elastic import ElasticPool

__all__ = ["RECOVERIES", "pool_postgresql", "prefect", "pytest_terminal_summary", "recovered"]

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks all tests of this folder, which start Slurm's daemons: `make test-slurm` runs them."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")


@pytest.fixture(scope="session")
def network():
    """The network of servers and jobs: all of them are on this machine."""
    return SimpleNamespace(address="127.0.0.1", subnet="127.0.0.0/8")


@pytest.fixture(scope="session")
def session_cluster():
    """A Slurm cluster for all tests; tests use `cluster`."""
    cluster = SlurmCluster()
    try:
        yield cluster.start()
    finally:
        cluster.close()


@pytest.fixture
def cluster(session_cluster):
    """The Slurm cluster, with all nodes idle."""
    session_cluster.heal()
    return session_cluster


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    """Trains the undisturbed models that serve as references."""
    with ForkServer() as server:
        yield Workbench(server, tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def session_pool(session_cluster, network, pool_postgresql, prefect, tmp_path_factory):
    """A pool whose nodes are jobs of the cluster, for all tests; tests use `pool`."""
    folder = tmp_path_factory.mktemp("pool")
    pool = ElasticPool(
        folder,
        cluster=session_cluster,
        network=network,
        database_url=pool_postgresql.create("pool"),
        prefect=prefect,
        mlflow_uri=f"sqlite:///{folder}/mlflow.db",
        timeouts=PATIENCE,
    )
    try:
        pool.prepare()
        yield pool
    finally:
        pool.close()


@pytest.fixture
def pool(session_pool, session_cluster):
    """The pool, repaired before each test, without nodes."""
    session_cluster.heal()
    session_pool.heal()
    yield session_pool
    session_pool.abandon()
