"""Access of a pool's clients to MLflow's server, here a small server that requires a password."""

import base64
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ringmaster.flows.services.up_and_down import is_let_in
from ringmaster.flows.settings import PoolAddress

EXPECTED = f"Basic {base64.b64encode(b'ringmaster:right').decode()}"


class Guarded(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers.get("Authorization") == EXPECTED else 401)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    server = HTTPServer(("127.0.0.1", 0), Guarded)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield lambda password: PoolAddress(
        database="d", prefect_api="p", mlflow_uri=f"http://127.0.0.1:{server.server_port}", password=password
    )
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_right_password_lets_one_in(address):
    assert is_let_in(address("right"))


@pytest.mark.parametrize("password", ["wrong", ""])
def test_any_other_is_told_with_what_to_do(address, password, capsys):
    assert not is_let_in(address(password))
    assert "docs/operations.md" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_told(capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # the port is taken, but nobody listens
        address = PoolAddress(database="d", prefect_api="p", mlflow_uri=f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert not is_let_in(address)
    assert "MLflow did not confirm" in capsys.readouterr().err
