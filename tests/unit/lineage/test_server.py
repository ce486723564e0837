"""What MLflow tells everybody is told to those alone who know the password."""

import asyncio
import base64

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

KNOWN = f"Basic {base64.b64encode(b'ringmaster:secret').decode()}"


def current_user(request):
    if request.headers.get("authorization") != KNOWN:
        return Response("who?", status_code=401, headers={"WWW-Authenticate": "Basic"})
    return PlainTextResponse("ringmaster")


def told(request):
    return PlainTextResponse("all")


@pytest.fixture
def server():
    """The module of the server, which imports all of MLflow's commands: other tests need not wait for them."""
    from ringmaster.model_lineage import mlflow_server

    return mlflow_server


@pytest.fixture
def client(server):
    paths = ("/api/3.0/mlflow/server-info", "/ajax-api/3.0/mlflow/server-info", "/health")
    routes = [Route(server.CLOSED, current_user), *(Route(path, told) for path in paths)]
    return TestClient(server.PasswordForAll(Starlette(routes=routes)))


@pytest.mark.parametrize("path", ["/api/3.0/mlflow/server-info", "/ajax-api/3.0/mlflow/server-info"])
def test_server_info_asks_for_the_password(client, path):
    for headers in ({}, {"Authorization": "Basic d3Jvbmc6d3Jvbmc="}):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, answer.text, answer.headers["www-authenticate"]) == (401, "who?", "Basic")
    assert client.get(path, headers={"Authorization": KNOWN}).text == "all"
    assert client.head(path).status_code == 401
    assert client.get(path.replace("server", "%73erver")).status_code == 401


def test_health_checks_stay_open(client):
    assert client.get("/health").text == "all"


def test_an_application_that_gives_no_answer_is_closed(server):
    async def silent(scope, receive, send):
        pass

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/api/3.0/mlflow/server-info", "method": "GET", "headers": []}
    asyncio.run(server.PasswordForAll(silent)(scope, None, send))
    assert sent[0]["status"] == 401
