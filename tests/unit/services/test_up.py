"""Two `ringmaster up` of one home: at the same time, or after one that was interrupted."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.flows.services import up_and_down
from ringmaster.flows.services.databases import databases
from ringmaster.flows.services.files import Service
from ringmaster.flows.services.needed import PoolOptions
from ringmaster.flows.settings import PoolAddress
from ringmaster.techniques.interface.values import to_json
from tests.ports import free_port

LIVES = "import signal; signal.pause()"


class Answering(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def mlflow():
    server = HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def options(tmp_path):
    port = free_port()
    where = databases(None, home=tmp_path)
    return PoolOptions(
        home=tmp_path,
        databases=where,
        password="a password",
        port_prefect=port,
        port_mlflow=(other := free_port(but=[port])),
        port_metrics=free_port(but=[port, other]),
    )


@pytest.fixture
def begun(options, mlflow):
    """The state that an interrupted `up` leaves: a supervisor, and no file with the pool's address."""
    address = PoolAddress(database=options.databases.pool, prefect_api="http://p/api", mlflow_uri=mlflow)
    files = up_and_down.files_of(options.home)
    files.make()
    services = [Service(name=name, command=(sys.executable, "-c", LIVES), environment={}) for name in ("one", "two")]
    files.write_services(services, address=address)
    supervisor = up_and_down._supervise(files)
    yield address, supervisor
    up_and_down.stop(options.home)


def test_the_next_up_goes_on_where_another_was_ended(options, begun, capsys):
    address, supervisor = begun
    assert not up_and_down.is_up(options.home)
    assert up_and_down.start(options, database_server=None)
    assert json.loads(settings.pool_file(options.home).read_text()) == to_json(address)
    assert up_and_down.is_up(options.home)
    assert up_and_down.files_of(options.home).supervisor() == supervisor
    assert "going on with what another `ringmaster up` began" in capsys.readouterr().err


def test_one_up_at_a_time(options, begun):
    _, supervisor = begun
    files = up_and_down.files_of(options.home)
    with files.alone("up") as alone, pytest.raises(InputError, match="another `ringmaster up` is starting the pool"):
        assert alone
        up_and_down.start(options, database_server=None)
    assert files.supervisor() == supervisor  # the other one's supervisor continues


@pytest.mark.parametrize("was_up", [True, False])
def test_a_pool_that_was_up_is_not_ended_where_not_all_of_it_comes_back(options, begun, monkeypatch, was_up):
    address, supervisor = begun
    if was_up:
        settings.pool_file(options.home).write_text(json.dumps(to_json(address)))
    monkeypatch.setattr(up_and_down, "_follow", lambda *_: False)
    assert not up_and_down.start(options, database_server=None)
    assert supervisor.lives() == was_up
