"""A node's worker with a real Prefect server, and gangs whose results the test scripts."""

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

pytest.importorskip("prefect")

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Pending

from ringmaster.flows.deployments import make_work_pool
from ringmaster.flows.pool.worker import NodeWorker
from ringmaster.flows.segment import segment as segment_flow
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques.runtime.processes.gang import DONE, PREEMPTED, Outcome
from tests.ports import free_port
from tests.unit.pool.node.test_agent import Site, until

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
            name="segment",
            work_pool_name=POOL,
            entrypoint="ringmaster.flows.segment.segment",
            path=str(server.folder),
        )
    yield server
    server.stop()


@contextmanager
def serving(site):
    """Runs a worker for the site's node agent in a thread; yields a function that stops it gracefully."""
    started, workers = threading.Event(), []

    async def serve():
        worker = NodeWorker(site.host, work_pool=POOL, drain_s=10.0)
        workers.append((worker, asyncio.get_running_loop()))
        started.set()
        await worker.serve()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(contextvars.copy_context().run, asyncio.run, serve())  # with Prefect's settings
        assert started.wait(300)

        def stop():
            worker, loop = workers[0]
            if not served.done():
                loop.call_soon_threadsafe(worker.stop)
            served.result(timeout=300)

        yield stop
        stop()


@pytest.fixture
def node(prefect_server, tmp_path):
    """A served node, with its Prefect client, and `stop`, which ends its worker."""
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    site = Site(database)
    with temporary_settings({PREFECT_API_URL: prefect_server.api}), get_client(sync_client=True) as client:
        site.client = client
        with serving(site) as site.stop:
            yield site
    database.close()


def launch(site, segment):
    """Orders a segment as the executor does; returns its flow run."""
    site.give(segment)
    deployment = site.client.read_deployment_by_name("segment/segment")
    flow_run = site.client.create_flow_run_from_deployment(
        deployment.id,
        parameters={"segment": segment, "node": "n"},
        work_queue_name="node-n",
        idempotency_key=f"{site.host.incarnation}-{segment}",
    )
    site.message_store.note_flow_run(segment, "n", str(flow_run.id))
    return flow_run.id


def state(site, flow_run):
    return site.client.read_flow_run(flow_run).state_name


def test_a_segment_runs_inside_the_worker_and_prefect_shows_how_it_went(node):
    flow_run = launch(node, 1)
    until(lambda: 1 in node.gangs)
    until(lambda: state(node, flow_run) == "Running")
    node.gangs[1].script.put(Outcome(status=DONE, result={"step": 10}))
    until(lambda: state(node, flow_run) == "Completed")
    assert node.outcomes() == {1: DONE}


def test_a_run_that_is_cancelled_stops_its_gang_at_a_checkpoint(node):
    flow_run = launch(node, 2)
    until(lambda: state(node, flow_run) == "Running")
    node.client.set_flow_run_state(flow_run, Cancelling())
    until(lambda: state(node, flow_run) == "Cancelled")
    assert node.gangs[2].told == ["stop"]
    assert node.outcomes() == {2: "cancelled"}


def test_a_run_whose_order_was_withdrawn_is_cancelled(node):
    node.give(3)
    node.message_store.withdraw(3, "n")
    flow_run = launch(node, 3)
    until(lambda: state(node, flow_run) == "Cancelled")
    assert not node.gangs


def test_a_run_that_was_claimed_in_vain_is_run_all_the_same(node, monkeypatch):
    """The worker's claim succeeded, but Prefect's answer was lost: the run is in no queue any more."""
    monkeypatch.setattr("ringmaster.flows.pool.worker.OVERDUE_S", 0.0)
    node.give(4)
    deployment = node.client.read_deployment_by_name("segment/segment")
    flow_run = node.client.create_flow_run_from_deployment(
        deployment.id, parameters={"segment": 4, "node": "n"}, work_queue_name="default"
    ).id
    node.client.set_flow_run_state(flow_run, Pending())
    node.message_store.note_flow_run(4, "n", str(flow_run))
    until(lambda: 4 in node.gangs)
    node.gangs[4].script.put(Outcome(status=DONE))
    until(lambda: state(node, flow_run) == "Completed")


def test_a_worker_that_is_ended_drains_its_node(node):
    flow_run = launch(node, 5)
    until(lambda: state(node, flow_run) == "Running")
    node.stop()
    assert state(node, flow_run) == "Preempted"
    assert node.outcomes() == {5: PREEMPTED}
    assert not node.nodes.all()


def test_gangs_go_on_while_prefect_is_away_and_it_is_told_later(node, prefect_server):
    ended, going_on = launch(node, 6), launch(node, 7)
    until(lambda: node.gangs.keys() == {6, 7})
    until(lambda: [state(node, run) for run in (ended, going_on)] == ["Running", "Running"])
    prefect_server.stop()
    node.gangs[6].script.put(Outcome(status=DONE))
    until(lambda: node.outcomes() == {6: DONE})
    node.give(8)
    until(lambda: 8 in node.gangs)  # devices do not idle until Prefect is back
    prefect_server.start()
    unseen = launch(node, 8)
    until(lambda: state(node, ended) == "Completed")
    assert node.host.running.keys() == {7, 8}
    node.gangs[7].script.put(Outcome(status=DONE))
    until(lambda: state(node, going_on) == "Completed")
    until(lambda: state(node, unseen) == "Running")
    node.gangs[8].script.put(Outcome(status=DONE))
    until(lambda: state(node, unseen) == "Completed")
