"""Requests to Prefect's server under a foreign host name are refused before Prefect sees them."""

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse

from ringmaster.flows.services.serving import LOOPBACK, checked


async def answer(_):
    return PlainTextResponse("served")


async def greet(websocket):
    await websocket.accept()
    await websocket.send_text("served")
    await websocket.close()


@pytest.fixture
def client():
    return TestClient(checked(Starlette(routes=[Route("/api", answer), WebSocketRoute("/in", greet)]), LOOPBACK))


OWN = ["127.0.0.1", "127.0.0.1:4200", "localhost:8200", "LOCALHOST", "[::1]:4200"]
FOREIGN = ["evil.example", "evil.example:4200", "127.0.0.1.evil.example", "localhost.evil.example:4200", "10.0.0.1", ""]


@pytest.mark.parametrize("host", OWN)
def test_its_own_names_are_served_by_any_port(client, host):
    assert client.get("/api", headers={"Host": host}).text == "served"
    with client.websocket_connect("/in", headers={"Host": host}) as websocket:
        assert websocket.receive_text() == "served"


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names_are_refused(client, host):
    assert client.get("/api", headers={"Host": host}).status_code == 400
    with (
        pytest.raises(WebSocketDenialResponse) as refused,
        client.websocket_connect("/in", headers={"Host": host}),
    ):
        pass
    assert refused.value.status_code == 400
