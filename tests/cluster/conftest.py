import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from ringmaster.tasks.storage.database import Database
from ringmaster.techniques.processes.forkserver_client import ForkServer
from tests.cluster.machines import Network, end
from tests.cluster.pool import Pool
from tests.cluster.postgresql import PostgresServer
from tests.cluster.servers import mlflow_server, prefect_server
from tests.integration.workbench import Workbench
from tests.pool_home import Home

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks all tests of this folder, which take minutes: `make test-cluster` runs them, `make test` does not."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("cluster")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1200))  # the first test of a session waits for all servers


@pytest.fixture(scope="session")
def postgresql():
    """A PostgreSQL server: `.url(name)`, `.create(name)`, `.stop(how)`, `.start()`, `.restart(how)`."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def empty_tables(postgresql):
    """The name of a PostgreSQL database with a pool's tables, to be copied: making them takes longer."""
    Database(postgresql.create("empty_tables")).close()
    return "empty_tables"


@pytest.fixture
def postgresql_url(postgresql, empty_tables):
    """The address of a PostgreSQL database for this test, with the empty tables of a pool."""
    name = f"test_{uuid4().hex[:12]}"
    yield postgresql.create(name, template=empty_tables)
    postgresql.drop(name)


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory):
    """A home with a running pool with a worker, on SQLite; and the completed `up` command.

    Each file has its own, since it may leave the pool down: files run in any order.
    """
    home = Home(tmp_path_factory.mktemp("sqlite"))
    try:
        yield home, home.up("--json", "--log-format", "json")
    finally:
        home.down()


RECOVERIES = pytest.StashKey[list]()
# Timeouts between the parts of the tests' pool, "beat,lost,fence" in seconds; "5,60,40" in production. A machine that
# is busy with other work needs longer ones.
PATIENCE = os.environ.get("RINGMASTER_TEST_PATIENCE", "1,30,18")
LOST_S = float(PATIENCE.split(",")[1])


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    """Trains the undisturbed models that serve as references."""
    with ForkServer() as server:
        yield Workbench(server, tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def network():
    """The network that connects the nodes."""
    network = Network()
    try:
        yield network
    finally:
        network.close()


@pytest.fixture(scope="session")
def pool_postgresql(network):
    """A PostgreSQL server that all nodes reach."""
    server = PostgresServer(address=network.address, networks=(network.subnet,))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def prefect(network, pool_postgresql, tmp_path_factory):
    """A Prefect server on PostgreSQL that all nodes reach."""
    database = pool_postgresql.create("prefect")
    server = prefect_server(tmp_path_factory.mktemp("prefect"), network.address, database=database)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def mlflow(network, pool_postgresql, tmp_path_factory):
    """An MLflow server that all nodes reach."""
    server = mlflow_server(tmp_path_factory.mktemp("mlflow"), network.address)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def session_pool(network, pool_postgresql, prefect, tmp_path_factory):
    """A pool of two nodes with one device each, for all tests; tests use `pool`."""
    folder = tmp_path_factory.mktemp("pool")
    pool = Pool(
        folder,
        network=network,
        database_url=pool_postgresql.create("pool"),
        prefect=prefect,
        mlflow_uri=f"sqlite:///{folder}/mlflow.db",
        timeouts=PATIENCE,
    )
    try:
        pool.prepare()
        cores = sorted(os.sched_getaffinity(0))
        for number, name in enumerate(("alpha", "beta")):
            pool.add_node(name, core=cores[number % len(cores)])
        pool.options["alpha"] = ("--flows",)  # it runs the flows that Prefect's UI starts
        yield pool
    finally:
        pool.close()


@pytest.fixture
def pool(session_pool):
    """The pool, repaired before each test."""
    session_pool.heal()
    yield session_pool
    session_pool.abandon()


@pytest.fixture
def parents(pool, mlflow, tmp_path):
    """Starts commands on a node, as a user would; ends those that a failed test leaves behind."""
    found = []

    def start(*words, node="alpha"):
        log = tmp_path / f"parent-{len(found)}.log"
        environment = {**pool.environment, "MLFLOW_TRACKING_URI": mlflow.url, "RINGMASTER_NODE": node}
        command = [sys.executable, "-m", "ringmaster.flows.entry", *map(str, words)]
        process = pool.nodes[node].popen(command, environment=environment, log=log)
        process.log = log
        found.append(process)
        return process

    yield start
    for process in found:
        if process.poll() is None:
            end(process, number=signal.SIGKILL)


@pytest.fixture
def recovered(request):
    """Records the seconds from a fault to the recovery, for the end of the report."""

    def note(fault, seconds):
        request.config.stash.setdefault(RECOVERIES, []).append((fault, seconds))

    return note


def pytest_terminal_summary(terminalreporter, config):
    """Prints the recovery time of each fault."""
    found = config.stash.get(RECOVERIES, [])
    if found:
        terminalreporter.section("seconds to recovery")
        for fault, seconds in found:
            terminalreporter.line(f"{seconds:7.1f}  {fault}")
