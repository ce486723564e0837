"""`ringmaster up --engine work-pool`, on PostgreSQL and with a given password: a node is a flow run that comes for a
batch, and is given back when idle.
"""

import subprocess
import sys

import psycopg
import pytest

from ringmaster.flows.services.pool_processes import ServiceStatus
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.storage.database import Database
from tests.cluster.machines import end
from tests.cluster.waiting import until
from tests.pool_home import Home, ask

NAMES = ["prefect", "mlflow", "metrics", "deployments", "controller", "flows"]
OPTIONS = ["--engine", "work-pool", "--work-pool", "gpus", "--max-nodes", "1", "--idle", "8", "--node-devices", "cpu:2"]


PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def home(tmp_path_factory, postgresql):
    home = Home(tmp_path_factory.mktemp("elastic"))
    secret = home.folder / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    try:
        done = home.up(*OPTIONS, "--database", postgresql.url("elastic"), "--password-file", str(secret))
        assert done.returncode == 0, done.stderr
        yield home
    finally:
        done = home.down()
        home.wait_until_nobody_is_left()
    assert done.returncode == 0, done.stderr


@pytest.fixture
def worker(home):
    """The worker of the work pool, as on a machine that is lent."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "gpus", "--type", "process"]
    with (home.folder / "prefect-worker.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=home.folder,
            env={**home.environment, **home.address().environment(), "PREFECT_HOME": str(home.folder / "prefect")},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)


def runs_of_nodes(home):
    """The states of the flow runs that serve nodes, oldest first."""
    body = {"flows": {"name": {"any_": ["serve-node"]}}, "sort": "START_TIME_ASC"}
    _, runs = home.ask(f"{home.address().prefect_api}/flow_runs/filter", body=body)
    return [run["state"]["name"] for run in runs]


def test_a_pool_on_postgresql_that_asks_for_a_password(home, postgresql):
    address = home.address()
    assert address.database == postgresql.url("elastic")
    with psycopg.connect(address.database) as connection:
        names = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'elastic%'").fetchall()
        assert sorted(name for (name,) in names) == ["elastic", "elastic_mlflow", "elastic_prefect"]
        assert connection.execute("SELECT count(*) FROM executor").fetchone() == (1,)
    urls = (
        f"{address.prefect_api}/work_pools/ringmaster",
        f"{address.mlflow_uri}/api/2.0/mlflow/experiments/get?experiment_id=0",
    )
    for url in urls:
        assert ask(url)[0] == 401
        assert ask(url, user="ringmaster:wrong")[0] == 401
        assert ask(url, user=f"ringmaster:{PASSWORD}")[0] == 200
    arguments = home.command_lines()
    assert any(arguments)
    assert not any(PASSWORD in text or postgresql.password in text for text in arguments)


def test_a_node_comes_for_a_batch_and_is_given_back(home, worker):
    assert {name: state.status for name, state in home.states().items()} == {
        **dict.fromkeys(NAMES, ServiceStatus.UP),
        "deployments": ServiceStatus.DONE,
    }
    database = Database(home.address().database)
    try:
        assert NodeRegistry(database).all() == [] and runs_of_nodes(home) == []
        home.run_batch()
        until("the node is given back", lambda: NodeRegistry(database).all() == [])
    finally:
        database.close()
    until("its flow run has ended", lambda: not {"Running", "Cancelling"} & {*runs_of_nodes(home)})
    # On a busy machine, a node may have been idle for 8 s, and another one have come.
    assert {*runs_of_nodes(home)} == {"Cancelled"}, "nobody needs a node any more"
