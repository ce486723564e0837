"""Pages of other origins: which requests are theirs, and that a server refuses what they may do in a person's name."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from ringmaster.origins import OwnOrigin, is_foreign

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
# (address by which a server was requested, origin of its own page)
ADDRESSES = [
    ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
    ("http://localhost:5000", "http://localhost:5000"),
    ("http://[::1]:5000", "http://[::1]:5000"),
    ("http://pool.example.org", "http://pool.example.org"),
    ("https://pool.example.org", "https://pool.example.org"),
    ("ws://127.0.0.1:5000", "http://127.0.0.1:5000"),
    ("wss://pool.example.org", "https://pool.example.org"),
]
OTHERS = [
    "http://127.0.0.1:9999",
    "http://localhost:9999",
    "http://[::1]:9999",
    "http://127.0.0.1",
    "http://127.0.0.2:5000",
    "http://0.0.0.0:5000",
    "ftp://127.0.0.1:5000",
    "http://127.0.0.1:5000.evil.example",
    "http://127.0.0.1:50000",
    "http://127.0.0.1:5000/",
    "http://user@127.0.0.1:5000",
    "http://evil.example",
    "file://",
    "null",
    "",
    "*",
]


def scope_of(address, *origins):
    scheme, _, host = address.partition("://")
    headers = [(b"host", host.encode()), *((b"origin", each.encode()) for each in origins)]
    return {"type": "http", "scheme": scheme, "headers": headers}


@pytest.mark.parametrize(("address", "own"), ADDRESSES)
def test_an_own_page_has_the_address_that_the_server_was_asked_by(address, own):
    assert not is_foreign(scope_of(address))
    assert not is_foreign(scope_of(address, own))
    others = [*OTHERS, *(origin for _, origin in ADDRESSES if origin != own)]
    assert [each for each in others if not is_foreign(scope_of(address, each))] == []
    assert is_foreign(scope_of(address, own, "http://evil.example"))


class Server:
    """A server that would let any page do anything, and lists the requests that it got."""

    def __init__(self):
        self.requests = []
        routes = [Route("/", self.answer, methods=METHODS), WebSocketRoute("/", self.greet)]
        open_to_all = CORSMiddleware(
            Starlette(routes=routes), allow_origin_regex=".*", allow_credentials=True, allow_methods=["*"]
        )
        self.client = TestClient(OwnOrigin(open_to_all), base_url="http://127.0.0.1:5000")

    async def answer(self, request):
        self.requests.append(request.method)
        return PlainTextResponse("done")

    async def greet(self, socket):
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()


@pytest.mark.parametrize("origin", [each for each in OTHERS if each])
def test_other_pages_change_nothing_and_read_nothing(origin):
    server = Server()
    for method in METHODS:
        preflight = {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
        answer = server.client.request(method, "/", headers={"Origin": origin, **preflight})
        assert answer.status_code == (200 if method in ("GET", "HEAD") else 403)
        assert [name for name in answer.headers if name.startswith("access-control")] == []
    assert server.requests == ["GET", "HEAD"]
    with pytest.raises(WebSocketDisconnect), server.client.websocket_connect("/", headers={"Origin": origin}):
        pass


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://127.0.0.1:5000"}])
def test_own_pages_and_programs_are_served(headers):
    server = Server()
    for method in METHODS:
        assert server.client.request(method, "/", headers=headers).status_code == 200
    assert server.requests == METHODS
    with server.client.websocket_connect("/", headers={"Host": "127.0.0.1:5000", **headers}) as socket:
        assert socket.receive_text() == "hello"


def test_the_start_and_the_end_of_a_server_reach_the_application():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(OwnOrigin(app)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]
