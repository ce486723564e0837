"""The addresses of a pool's endpoints that stay: requests are passed on to the node that serves."""

import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from ringmaster.features.endpoint.routes import endpoint_routes, public_url
from ringmaster.flows.services.metrics_server import metrics_app
from ringmaster.flows.settings import PoolAddress
from tests.unit.services.test_metrics_app import KNOWN

NODE = "http://10.0.0.7:41235"


class Answer(httpx.AsyncByteStream):
    """A body that breaks off, or does not."""

    def __init__(self, content, *, breaks_off):
        self._content, self._breaks_off = content, breaks_off

    async def __aiter__(self):
        yield self._content
        if self._breaks_off:
            raise httpx.ReadError("the node has died")


class Node(httpx.AsyncBaseTransport):
    """A node that answers with what it was sent, or is away."""

    def __init__(self):
        self.is_there, self.breaks_off, self.requests = True, False, []

    async def handle_async_request(self, request):
        if not self.is_there:
            raise httpx.ConnectError("refused")
        body = await request.aread()
        self.requests.append(request)
        headers = {"Content-Type": "x/y", "Set-Cookie": "a=b"}
        return httpx.Response(207, headers=headers, stream=Answer(body[::-1], breaks_off=self.breaks_off))


@pytest.fixture
def node():
    return Node()


@pytest.fixture
def client(tmp_path, node):
    folder = tmp_path / "endpoints" / "mine"
    folder.mkdir(parents=True)
    (folder / "server.json").write_text(json.dumps({"url": NODE, "pid": 1}))
    app = Starlette(routes=endpoint_routes(tmp_path, transport=node))
    return TestClient(app, base_url="http://pool.example")


def test_a_request_reaches_the_node_as_it_is_with_its_key_and_no_cookies_or_passwords_of_others(client, node):
    answer = client.post(
        "/endpoints/mine/api/v1/samplers/a%3A1?x=1&y=%2F", content=b"abc",
        headers={"X-API-Key": "tml-1", "Content-Type": "application/x-protobuf", "Cookie": "c=d", "X-Tinker-A": "b"},
    )  # fmt: skip
    assert (answer.status_code, answer.content, answer.headers["Content-Type"]) == (207, b"cba", "x/y")
    assert "Set-Cookie" not in answer.headers
    (request,) = node.requests
    assert str(request.url) == f"{NODE}/api/v1/samplers/a%3A1?x=1&y=%2F"
    assert (request.headers["X-API-Key"], request.headers["X-Tinker-A"]) == ("tml-1", "b")
    assert "Cookie" not in request.headers and request.headers["Host"] == "10.0.0.7:41235"


@pytest.mark.parametrize("path", ["//evil.example/x", "../../metrics", "%2e%2e/%2e%2e/secret", "@evil.example/"])
def test_no_path_leads_to_another_host_or_out_of_the_api(client, node, path):
    client.get(f"/endpoints/mine/api/v1/{path}")
    for request in node.requests:
        assert (request.url.host, request.url.port) == ("10.0.0.7", 41235)
        assert request.url.raw_path.startswith(b"/api/v1/")


def test_while_no_node_serves_the_client_is_to_try_again(client, node, tmp_path):
    node.is_there = False
    answer = client.post("/endpoints/mine/api/v1/optim_step")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    node.is_there, node.breaks_off = True, True
    assert client.post("/endpoints/mine/api/v1/optim_step").status_code == 503
    assert len(node.requests) == 1
    (tmp_path / "endpoints" / "mine" / "server.json").unlink()
    assert client.post("/endpoints/mine/api/v1/optim_step").status_code == 503
    assert len(node.requests) == 1


@pytest.mark.parametrize("name", ["other", "..", "%2e%2e", "a%2fb"])
def test_there_are_no_others(client, node, name):
    assert client.get(f"/endpoints/{name}/api/v1/healthz").status_code == 404
    assert node.requests == []


def test_a_page_of_another_origin_reaches_no_node(client, node):
    answer = client.post("/endpoints/mine/api/v1/optim_step", headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403 and node.requests == []


def test_endpoints_are_not_behind_the_password_of_the_pool_and_the_metrics_are(tmp_path, node):
    routes = endpoint_routes(tmp_path, transport=node)
    app = metrics_app(lambda: KNOWN, username="u", password="p", keyed_routes=routes)
    client = TestClient(app)
    assert client.get("/metrics").status_code == 401
    assert client.get("/endpoints/mine/api/v1/healthz").status_code == 404
    assert client.get("/endpoints/mine/other").status_code == 401


def test_an_address_stays_where_the_metrics_are_known():
    pool = PoolAddress(database="", prefect_api="", mlflow_uri="", metrics_url="http://10.0.0.1:9464/metrics")
    assert public_url(pool, "mine") == "http://10.0.0.1:9464/endpoints/mine"
    assert public_url(PoolAddress(database="", prefect_api="", mlflow_uri=""), "mine") is None
