"""The worker that starts flow runs, with a real Prefect server."""

import os
import subprocess
import sys

import httpx
import pytest

pytest.importorskip("prefect")

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling

from ringmaster.flows.deployments import make_work_pool
from ringmaster.flows.pool.flow_worker import DEFAULT_QUEUE, REQUESTS_QUEUE, FlowWorker
from ringmaster.flows.pool.node import segment as segment_flow
from ringmaster.flows.pool.segment_runs import DEPLOYMENT
from tests.ports import free_port
from tests.unit.pool.node.test_agent import until

POOL = "ringmaster"
pytestmark = pytest.mark.full


class PrefectServer:
    """A Prefect server that can be stopped and restarted on the same port and database."""

    def __init__(self, folder):
        self.folder, self.process, self.port = folder, None, free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"

    def start(self):
        environment = {
            **os.environ,
            "PREFECT_HOME": str(self.folder),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "true",
        }
        environment.pop("PREFECT_API_URL", None)
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.folder)
        until(self.is_up, timeout_s=300)

    def is_up(self):
        assert self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
        try:
            return httpx.get(f"{self.api}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=300)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    server.start()
    with temporary_settings({PREFECT_API_URL: server.api}), get_client(sync_client=True) as client:
        make_work_pool(client, POOL)
        flow_id = client.create_flow(segment_flow)
        client.create_deployment(
            flow_id,
            name=DEPLOYMENT.rpartition("/")[2],
            work_pool_name=POOL,
            entrypoint="ringmaster.flows.pool.node.segment",
            path=str(server.folder),
        )
    yield server
    server.stop()


PROGRAM = """
import time
from prefect import flow

@flow
def quick():
    pass

@flow
def slow():
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def deployments(prefect_server):
    """The deployments of a quick and of a slow flow, by name."""
    (prefect_server.folder / "program.py").write_text(PROGRAM)
    with temporary_settings({PREFECT_API_URL: prefect_server.api}), get_client(sync_client=True) as client:
        yield {
            name: client.create_deployment(
                client.create_flow_from_name(name),
                name=name,
                work_pool_name=POOL,
                work_queue_name="node-n",
                entrypoint=f"program.py:{name}",
                path=str(prefect_server.folder),
            )
            for name in ("quick", "slow")
        }


@pytest.fixture
def worker(prefect_server):
    """A worker of the queue of node n, as a child process."""
    with temporary_settings({PREFECT_API_URL: prefect_server.api}):
        environment = {"PREFECT_API_URL": prefect_server.api, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            worker = FlowWorker(name="n", work_pool=POOL, queues=["node-n", "another-that-is-not-there-yet"])
            worker.start()
            yield worker
            worker.stop()


def state(client, flow_run):
    return client.read_flow_run(flow_run).state_name


def test_a_flow_run_of_the_queue_is_run(client, worker, deployments):
    flow_run = client.create_flow_run_from_deployment(deployments["quick"])
    until(lambda: state(client, flow_run.id) == "Completed", timeout_s=300)


def test_a_worker_that_ends_ends_its_flow_runs_and_says_so(client, worker, deployments):
    flow_run = client.create_flow_run_from_deployment(deployments["slow"])
    until(lambda: state(client, flow_run.id) == "Running", timeout_s=300)
    worker.stop()
    assert state(client, flow_run.id) == "Crashed"


def test_a_worker_that_is_killed_is_started_anew(client, worker, deployments, monkeypatch):
    monkeypatch.setattr("ringmaster.flows.pool.flow_worker.RESTART_S", 0.1)
    until(lambda: worker._process is not None)
    worker._process.kill()
    flow_run = client.create_flow_run_from_deployment(deployments["quick"])
    until(lambda: state(client, flow_run.id) == "Completed", timeout_s=300)


def test_a_worker_waits_for_a_server_that_is_away(client, prefect_server, worker, deployments):
    prefect_server.stop()
    until(lambda: worker._process is not None)
    prefect_server.start()
    flow_run = client.create_flow_run_from_deployment(deployments["quick"])
    until(lambda: state(client, flow_run.id) == "Completed", timeout_s=300)


def test_batches_beyond_the_limit_wait_in_order_and_requests_overtake_them(client, prefect_server, deployments):
    flow_id = client.create_flow_from_name("slow")
    batch = client.create_deployment(
        flow_id, name="batch", work_pool_name=POOL, entrypoint="program.py:slow", path=str(prefect_server.folder)
    )
    request = client.create_deployment(
        client.create_flow_from_name("quick"),
        name="request",
        work_pool_name=POOL,
        work_queue_name=REQUESTS_QUEUE,
        entrypoint="program.py:quick",
        path=str(prefect_server.folder),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", prefect_server.api)
        patch.setenv("PREFECT_WORKER_QUERY_SECONDS", "1")
        worker = FlowWorker(name="m", work_pool=POOL, queues=["node-m", DEFAULT_QUEUE, REQUESTS_QUEUE], most_runs=1)
        worker.start()
        try:
            first, second, third = (client.create_flow_run_from_deployment(batch) for _ in range(3))
            until(lambda: state(client, first.id) == "Running", timeout_s=300)
            short = client.create_flow_run_from_deployment(request)
            until(lambda: state(client, short.id) == "Completed", timeout_s=300)
            assert client.read_flow_run(second.id).state.is_scheduled()
            client.set_flow_run_state(third.id, Cancelled(), force=True)
            client.set_flow_run_state(first.id, Cancelling(), force=True)
            until(lambda: state(client, second.id) == "Running", timeout_s=300)
            assert state(client, third.id) == "Cancelled"
        finally:
            worker.stop()
