"""An endpoint as a job of a pool: it outlives its rank and its node, with the bits of an undisturbed one."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import pytest
from mlflow import MlflowClient

from ringmaster.tasks.storage.journal import JobStatus
from tests.cluster.machines import end
from tests.cluster.servers import Server
from tests.cluster.waiting import TIMEOUT_S, until
from tests.ports import free_port
from tests.unit.serving.clients import PlainClient
from tests.unit.serving.served import write_base

PASSWORD = "of-the-pool"
ROW = [3, 1, 4, 1, 5, 9, 2, 6]


class PatientClient(PlainClient):
    """Repeats a request until it is answered, as the client `tinker` does."""

    def post(self, path, body=None, **options):
        options.pop("status", None)
        content = {"json": body} if body is not None else {}

        def answers():
            with suppress(httpx.TransportError):
                answer = self.http.post(path, **content, **options)
                return [answer] if answer.status_code not in (408, 503) else []

        (answer,) = until(f"{path} is answered", answers)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def result(self, request):
        return self.post("retrieve_future", {"request_id": request["request_id"]})


class Loop:
    """A program that trains an adapter."""

    def __init__(self, client, *, rank):
        self.client, self.seq, self.losses = client, 0, []
        self.model = client.model(client.session(user_metadata={"name": f"rank{rank}"}), rank=rank, lora_config={
            "rank": rank, "seed": rank,
        })  # fmt: skip

    def train(self, num_steps):
        for _ in range(num_steps):
            tokens = [(each + self.seq) % 61 for each in ROW]
            loss = self.client.result(self.client.loss(self.model, self.seq + 1, tokens))
            self.client.result(self.client.step(self.model, self.seq + 2, learning_rate=0.01))
            self.losses.append(loss["metrics"]["loss:sum"].hex())
            self.seq += 2
        return self


@pytest.fixture(scope="module")
def address(network, session_pool):
    """The server of the pool's metrics, under which endpoints have addresses that stay."""
    port = free_port(network.address)
    environment = {**session_pool.environment, "MLFLOW_TRACKING_PASSWORD": PASSWORD}
    environment["RINGMASTER_ALLOWED_HOSTS"] = network.address
    command = [sys.executable, "-m", "ringmaster.flows.services.metrics_server", "--port", str(port)]
    server = Server(
        session_pool.folder,
        name="metrics",
        url=f"http://{network.address}:{port}",
        command=[*command, "--host", network.address],
        health="/health",
        environment=environment,
    )
    try:
        yield server.start().url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


def endpoint_file(folder, base, *, name, **serve):
    file = folder / f"{name}.yaml"
    plain = {"bases": [{"name": "tiny", "from_pretrained": base}], "seq_len": 64, "max_rank": 8}
    file.write_text(json.dumps({"name": name, "serve": {**plain, **serve}}))
    return file


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """The losses of two loops on an endpoint of this machine."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "ringmaster.flows.entry", "serve", endpoint_file(folder, base, name="alone")]
    core = str(min(os.sched_getaffinity(0)))
    environment = {**os.environ, "RINGMASTER_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["taskset", "-c", core, *map(str, command), "--json"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        served = json.loads(process.stdout.readline())
        client = PatientClient(served["url"], served["key"])
        yield [Loop(client, rank=rank).train(6).losses for rank in (2, 4)]
    finally:
        process.stdout.close()
        end(process)


def served(pool, parents, address, file, *, name):
    """Submits an endpoint; returns its batch and a client, once it answers."""
    parent = parents("serve", file, "--pool", "--json")
    assert parent.wait(timeout=TIMEOUT_S) == 0, parent.log.read_text() + pool.tail("controller")
    key = json.loads(parent.log.read_text().splitlines()[-1])["key"]
    (batch,) = [id for id, of, status in pool.batches() if of == name and status != "ended"]
    return batch, PatientClient(f"{address}/endpoints/{name}", key)


def node_of(pool, batch):
    """Returns the node that serves an endpoint now, once its rank runs."""
    (segment,) = [each for each in pool.segments(batch) if each.outcome is None]
    return segment.spec.devices[0].partition(":")[0]


def rank_of(pool, node):
    """Returns the rank that serves, the parent of the process that computes."""
    (compute,) = [p for p in pool.nodes[node].processes() if "endpoint.compute.process" in " ".join(p.cmdline())]
    return compute.parent()


def test_an_endpoint_outlives_its_rank_and_its_node(pool, parents, address, base, undisturbed, tmp_path, recovered):
    file = endpoint_file(tmp_path, base, name="lasting")
    batch, client = served(pool, parents, address, file, name="lasting")
    loops = [Loop(client, rank=rank).train(2) for rank in (2, 4)]
    status = parents("status", "--json")
    assert status.wait(timeout=TIMEOUT_S) == 0, status.log.read_text()
    assert '"rank2"' in status.log.read_text()
    first, began_s = node_of(pool, batch), time.monotonic()
    pool.nodes[first].lose()
    for loop in loops:
        loop.train(2)
    recovered("the node of an endpoint is lost", time.monotonic() - began_s)
    second, began_s = node_of(pool, batch), time.monotonic()
    assert second != first
    rank_of(pool, second).kill()
    for loop in loops:
        loop.train(2)
    recovered("the rank of an endpoint is killed", time.monotonic() - began_s)
    assert [loop.losses for loop in loops] == undisturbed
    assert parents("jobs", "cancel", "lasting", node=second).wait(timeout=TIMEOUT_S) == 0
    pool.wait(batch, status=JobStatus.CANCELLED)
    until("the server has ended", lambda: not (pool.home / "endpoints" / "lasting" / "server.json").exists())
    assert client.http.get("healthz").status_code == 503


def test_an_idle_endpoint_leaves_its_device_and_a_model_in_the_lineage(pool, parents, address, base, tmp_path):
    file = endpoint_file(tmp_path, base, name="brief", idle_s=15)
    batch, client = served(pool, parents, address, file, name="brief")
    Loop(client, rank=2).train(1)
    pool.wait(batch)
    registered = MlflowClient(tracking_uri=pool.environment["MLFLOW_TRACKING_URI"]).get_registered_model("brief.rank2")
    assert [int(each.version) for each in registered.latest_versions] == [1]
