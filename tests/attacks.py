"""Requests that a page of another site, or another user of the machine, may try on servers on loopback."""

import asyncio
import base64
import http.client
import json
import stat
from urllib.parse import urlsplit

import websockets

SITE = "http://evil.example"
TIMEOUT_S = 120
UNAUTHORIZED = 401
# An automation that would run a program of the attacker's choice at any event.
AUTOMATION = {
    "name": "evil",
    "trigger": {"type": "event", "posture": "Reactive", "expect": ["*"], "threshold": 1, "within": 0},
    "actions": [{"type": "run-deployment", "deployment_id": "00000000-0000-0000-0000-000000000001"}],
}
SOCKETS = ("events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled")


def send(url, *, method="GET", headers=None, body=None, user=None):
    """The status and the headers of an answer. Headers that `headers` leaves out, even Content-Type, are not sent."""
    parts = urlsplit(url)
    every = dict(headers or {})
    if user:
        every["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path or "/"
        connection.request(method, path, headers=every, body=None if body is None else json.dumps(body))
        answer = connection.getresponse()
        answer.read()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def other_origins(url):
    """Origins of pages that are not those of the server at a URL, among them other ports and names of its machine."""
    port = urlsplit(url).port
    hosts = ("127.0.0.1", "localhost", "[::1]")
    same_port = [f"http://localhost:{port}", f"http://[::1]:{port}", f"https://127.0.0.1:{port}"]
    return [SITE, "null", "", *same_port, *(f"http://{host}{end}" for host in hosts for end in ("", ":9999"))]


def expect_own_pages_alone(url, *, method, user):
    """Asserts that a server refuses requests of pages of other origins, and tells browsers of none that may read it."""
    preflight = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization"}
    for origin in other_origins(url):
        for each in ("OPTIONS", method, "POST", "PUT", "DELETE"):
            headers = {"Origin": origin, **(preflight if each == "OPTIONS" else {})}
            asks = None if each == "OPTIONS" else user  # browsers send preflights without a password
            status, answered = send(url, method=each, headers=headers, body={}, user=asks)
            assert status == 403, (each, origin, status)
            assert [name for name in answered if name.startswith("access-control")] == [], (each, origin)
        _, answered = send(url, headers={"Origin": origin}, user=user)
        assert [name for name in answered if name.startswith("access-control")] == [], origin


def expect_closed_prefect(api, *, user):
    """Asserts that Prefect's server serves only clients that know the password and use its own name.

    url: ends in `/api`. user: USER:PASSWORD.
    """
    page = {"Origin": SITE}
    automations = f"{api}/automations/"
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json"}):
        assert send(automations, method="POST", headers=headers, body=AUTOMATION)[0] == UNAUTHORIZED
        assert send(automations, method="POST", headers={**page, **headers}, body=AUTOMATION, user=user)[0] == 403
    assert send(automations, method="POST", body=AUTOMATION, user="ringmaster:wrong")[0] == UNAUTHORIZED
    filter = {"method": "POST", "body": {"limit": 1}, "user": user}
    assert send(f"{api}/flows/filter", **filter)[0] == 200
    assert send(f"{api}/flows/filter", headers={"Origin": api.removesuffix("/api")}, **filter)[0] == 200
    expect_own_pages_alone(f"{api}/flows/filter", method="POST", user=user)
    for name in ("evil.example", "evil.example:4200", "127.0.0.1.evil.example"):
        assert send(f"{api}/flows/filter", headers={"Host": name}, **filter)[0] == 400
        assert send(f"{api}/health", headers={"Host": name})[0] == 400
    for method in ("GET", "OPTIONS"):
        asked = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        _, answered = send(f"{api}/health", method=method, headers=asked)
        assert answered.get("access-control-allow-origin") is None
    asyncio.run(_expect_closed_sockets(api.replace("http", "ws", 1), user))


async def _expect_closed_sockets(api, user):
    for path in SOCKETS:
        assert await _greet(f"{api}/{path}", user) == "auth_success", path
        for stranger in ("ringmaster:wrong", None):
            assert await _greet(f"{api}/{path}", stranger) is None, path
        for headers in ({"Host": "evil.example"}, {"Origin": SITE}, {"Origin": "http://127.0.0.1:9999"}):
            assert await _greet(f"{api}/{path}", user, headers) is None, path


async def _greet(url, user, headers=None):
    """The first message type of a socket, with or without a password. None where it is closed at once."""
    protocol = ["prefect"] if user else None
    try:
        async with websockets.connect(url, subprotocols=protocol, additional_headers=headers) as socket:
            if user:
                await socket.send(json.dumps({"type": "auth", "token": user}))
            return json.loads(await socket.recv())["type"]
    except (websockets.InvalidStatus, websockets.ConnectionClosed):
        return None


def expect_closed_mlflow(url, *, user):
    """Asserts the same of MLflow's server. user: USER:PASSWORD."""
    experiment = f"{url}/api/2.0/mlflow/experiments/get?experiment_id=0"
    assert send(experiment)[0] == UNAUTHORIZED
    for kind in ("api", "ajax-api"):
        told = f"{url}/{kind}/3.0/mlflow/server-info"
        assert (send(told)[0], send(told, user=user)[0]) == (UNAUTHORIZED, 200)
    assert send(experiment, user="ringmaster:wrong wrong")[0] == UNAUTHORIZED
    status, answered = send(experiment, headers={"Origin": SITE}, user=user)
    assert (status, answered.get("access-control-allow-origin")) == (200, None)
    for name in ("evil.example", "10.evil.example", "192.168.evil.example:5000", "localhost.evil.example"):
        assert send(experiment, headers={"Host": name, "Origin": f"http://{name}"}, user=user)[0] == 403
        assert send(experiment, headers={"Host": name}, user=user)[0] == 403
    search = f"{url}/ajax-api/2.0/mlflow/experiments/search"
    filter = {"method": "POST", "headers": {"Origin": url, "Content-Type": "application/json"}, "user": user}
    assert send(search, body={"max_results": 1}, **filter)[0] == 200
    for path in (search, f"{url}/graphql", f"{url}/api/2.0/mlflow-artifacts/artifacts/0/run/artifacts/page.txt"):
        expect_own_pages_alone(path, method="PUT", user=user)
    make = f"{url}/api/2.0/mlflow/experiments/create"
    for kind in ("text/plain", "application/json"):
        headers = {"Origin": SITE, "Content-Type": kind}
        assert send(make, method="POST", headers=headers, body={"name": "evil"}, user=user)[0] == 403


def open_to_others(folder):
    """The paths in a folder, itself included, that other users of the machine may read, write or enter."""
    found = []
    for path in (folder, *sorted(folder.rglob("*"))):
        mode = path.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode):
            found.append(f"{stat.filemode(mode)} {path.relative_to(folder)}")
    return found
