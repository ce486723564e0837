"""Two `ringmaster up` of one home: at the same time, or after one that was interrupted."""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ringmaster.codec import to_json
from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.services import up_and_down
from ringmaster.flows.services.service_definitions import PoolOptions, databases
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.leases import leases_of
from ringmaster.tasks.pool.engines import Service
from ringmaster.techniques.processes.stopped import is_stopped
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
    with (
        files.alone("up") as alone,
        pytest.raises(InputError, match="by another `ringmaster up`, process"),
    ):
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


@pytest.fixture
def starting(options, mlflow):
    """Starts services, of which `worker` never serves, as an `up` that continues with what another began."""
    files = up_and_down.files_of(options.home)
    files.make()

    def start(*names):
        address = PoolAddress(database=options.databases.pool, prefect_api="http://p/api", mlflow_uri=mlflow)
        run = (sys.executable, "-c", LIVES)
        services = [Service(name=name, command=run, environment={}, says_ready=name == "worker") for name in names]
        files.write_services(services, address=address)
        up_and_down._supervise(files)
        return up_and_down.start(options, database_server=None)

    yield start
    up_and_down.stop(options.home)


def test_a_node_whose_devices_a_run_holds_is_not_waited_for_and_the_run_is_named(options, starting, capsys):
    leases_of(options.home, Cluster(nodes=())).take(["here:cpu:0"], holder="batch nightly")
    assert starting("one", "worker")
    said = capsys.readouterr().err
    assert f"waits for this machine's devices, which batch nightly (process {os.getpid()}) holds" in said
    assert "To fix: let that run end, or end it by Ctrl-C" in said
    assert settings.pool_file(options.home).exists()


def test_what_is_waited_for_is_told_with_its_log(options, starting, capsys, monkeypatch):
    monkeypatch.setattr(up_and_down, "REPORT_EVERY_S", 0.2)
    monkeypatch.setattr(up_and_down, "DEADLINE_S", 2.0)
    assert not starting("one", "worker")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("worker ")]
    assert "it does not lead or serve yet; log: " in lines[0]
    assert str(options.home / "pool" / "worker.log") in lines[0]


def test_a_supervisor_that_is_stopped_is_replaced(options, begun, capsys):
    _, supervisor = begun
    files = up_and_down.files_of(options.home)
    while not all(state.lives() for state in files.states()) or len(files.states()) < 2:
        pass
    supervisor.signal(signal.SIGSTOP)
    while not is_stopped(supervisor.pid):
        pass
    assert up_and_down.start(options, database_server=None)
    assert f"(process {supervisor.pid}) was stopped" in capsys.readouterr().err
    assert files.supervisor() not in (None, supervisor)
