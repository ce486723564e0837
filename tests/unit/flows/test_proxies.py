"""Proxies of the environment: what is on loopback never goes through them."""

import http.server
import os
import socketserver
import threading
import urllib.request
from itertools import product

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringmaster.flows.proxies import bypass_proxies
from ringmaster.flows.services import supervisor
from tests.matrix import matrix

NAMES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")
ODD = [
    "",
    " , ,,",
    "*",
    "a,*",
    "[::1]",
    "fd00::/8",
    "10.0.0.0/8",
    "host:abc",
    "http://x:80x",
    ".corp",
    "*.corp",
    "ü.de",
]
PROXY_VALUES = ["socks://h:1", "socks4://h:1", "socks5://h:1", "socks5h://h:1", "h:3128", "http://h:port", "::1", " h"]


@pytest.fixture
def environment(monkeypatch):
    """The environment of this process without any proxies."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers every request, as a server or a proxy."""

    def do_GET(self):
        self.server.num_requests += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Keeps stderr clean."""


@pytest.fixture
def listening():
    """Yields a function that starts a server on loopback, which counts its requests."""
    servers = []

    def start():
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer)
        server.num_requests = 0
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


@pytest.mark.parametrize(
    ("name", "exceptions"),
    # The exceptions are read in the same way whatever variable names the proxy.
    matrix(product(PROXIES, [None, *ODD]), quick=[*product(PROXIES, [None]), *product(["http_proxy"], ODD)]),
)
def test_no_client_reaches_loopback_through_a_proxy(environment, listening, name, exceptions):
    import requests

    proxy, server = listening(), listening()
    environment.setenv(name, f"http://127.0.0.1:{proxy.server_address[1]}")
    for each in ("NO_PROXY", "no_proxy"):
        if exceptions is not None:
            environment.setenv(each, exceptions)
        else:
            environment.setenv(each, "")  # so that it is restored after the test
            environment.delenv(each)
    assert bypass_proxies() == []
    clients = (httpx.get, requests.get, urllib.request.urlopen)
    for host in ("127.0.0.1", "localhost"):
        for client in clients:
            client(f"http://{host}:{server.server_address[1]}/")
    assert (proxy.num_requests, server.num_requests) == (0, 2 * len(clients))


def test_the_supervisor_asks_its_services_whatever_the_proxies_are(environment, listening):
    proxy, server = listening(), listening()
    environment.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    assert supervisor.answers(url)
    assert supervisor.responds(url)
    assert (proxy.num_requests, server.num_requests) == (0, 2)


def test_other_hosts_still_go_through_the_proxy(environment, listening):
    proxy = listening()
    variables = {"HTTP_PROXY": f"http://127.0.0.1:{proxy.server_address[1]}"}
    bypass_proxies(["pool.example"], environment=variables)
    environment.setenv("NO_PROXY", variables["NO_PROXY"])
    environment.setenv("HTTP_PROXY", variables["HTTP_PROXY"])
    httpx.get("http://huggingface.example/")
    assert proxy.num_requests == 1
    assert variables["NO_PROXY"].endswith("pool.example")


def test_the_exceptions_of_the_user_stay():
    variables = {"NO_PROXY": "a.example,10.0.0.0/8,[::1],fd00::/8", "no_proxy": ".b.example"}
    bypass_proxies(["pool"], environment=variables)
    exempt = "a.example,10.0.0.0/8,::1,.b.example,localhost,127.0.0.1,pool"
    assert variables == {"NO_PROXY": exempt, "no_proxy": exempt}


@given(
    st.dictionaries(st.sampled_from(NAMES[:6]), st.sampled_from(PROXY_VALUES) | st.text()),
    st.sampled_from(ODD) | st.text() | st.lists(st.text("[]:/.*@%a1 ü"), max_size=4).map(",".join),
)
@example({"ALL_PROXY": "socks://user:secret@h:1"}, "")
def test_httpx_works_with_any_values(proxies, exceptions):
    proxies = {name: value for name, value in proxies.items() if _may_be_set(value)}
    variables = {**proxies, "NO_PROXY": exceptions if _may_be_set(exceptions) else ""}
    removed = bypass_proxies(environment=variables)
    assert all("secret" not in line for line in removed)
    before = {name: os.environ.pop(name, None) for name in NAMES}
    try:
        os.environ.update(variables)
        httpx.Client(verify=False).close()  # certificates take long to load
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _may_be_set(value):
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False
