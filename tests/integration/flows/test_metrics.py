"""The server of a pool's metrics as a process of its own: real requests, while its database comes and goes."""

import base64
import http.client
import os
import signal
import subprocess
import sys
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringmaster.flows.services import metrics_server as metrics_server
from ringmaster.tasks.storage.database import Database, file_url
from tests.attacks import SITE, UNAUTHORIZED, send
from tests.cluster.waiting import until
from tests.ports import free_port
from tests.unit.pool.workers import Worker

PASSWORD = "correct horse battery"
USER = f"ringmaster:{PASSWORD}"
FOREIGN = ("RINGMASTER_", "PREFECT_", "MLFLOW_")


class Served:
    """A server of metrics. url: its page; database: the file of the pool's database; log: what it has printed."""

    def __init__(self, folder):
        self.database, self.log = folder / "pool" / "pool.db", folder / "metrics.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/metrics"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment |= {
            "RINGMASTER_HOME": str(folder),
            "RINGMASTER_DATABASE": f"sqlite:///{self.database}",
            "PREFECT_API_URL": "http://127.0.0.1:1/api",
            "MLFLOW_TRACKING_URI": "http://127.0.0.1:1",
            "MLFLOW_TRACKING_PASSWORD": PASSWORD,
        }
        command = [sys.executable, "-m", metrics_server.__name__, "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        until("the server answers", self.answers)

    def answers(self):
        assert self.process.poll() is None, self.log.read_text()
        try:
            return send(self.url.replace("/metrics", "/health"))[0] == 200
        except OSError:
            return False

    def values(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        credentials = base64.b64encode(USER.encode()).decode()
        connection.request("GET", "/metrics", headers={"Authorization": f"Basic {credentials}"})
        text = connection.getresponse().read().decode()
        connection.close()
        families = text_string_to_metric_families(text)
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("metrics"))
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait()


def test_only_who_knows_the_password_may_read_it(served):
    status, headers = send(served.url, user=USER)
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert send(served.url, user="ringmaster:wrong")[0] == UNAUTHORIZED
    assert send(served.url)[0] == UNAUTHORIZED
    assert send(served.url, user=USER, headers={"Host": "evil.example"})[0] == 400
    status, headers = send(served.url, user=USER, headers={"Origin": SITE})
    assert (status, headers.get("access-control-allow-origin")) == (403, None)


def test_it_begins_without_the_database_and_follows_it_once_it_is_there(served):
    values = served.values()
    assert values["ringmaster_database_up",] == 0
    assert not [key for key in values if key[0] == "ringmaster_devices"]
    database = Database(file_url(served.database))
    Worker(database, "n1", num_devices=3)
    until("the node is seen", lambda: served.values().get(("ringmaster_devices", "n1", "idle")) == 3)
    assert served.values()["ringmaster_database_up",] == 1
    log = served.log.read_text()
    assert log.count("the pool's database does not answer: unable to open database file") == 1
    assert PASSWORD not in log
    database.close()


def test_it_ends_at_sigterm(served):
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=300) in (0, -signal.SIGTERM)


def test_an_error_of_the_sampling_ends_the_server_with_its_reason():
    """Otherwise it would serve old values for ever."""

    class Failing:
        def sample(self):
            raise ValueError("tables of another release")

    class Server:
        should_exit = False

    server, over, failed = Server(), threading.Event(), threading.Event()
    with pytest.raises(ValueError, match="another release"):
        metrics_server._sample(Failing(), server, over, failed)
    assert server.should_exit
    assert failed.is_set()


def test_without_a_password_it_does_not_start(tmp_path, monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith(FOREIGN):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    assert metrics_server.main(["--port", "1"]) == 2
    assert "no pool is up here. To fix: " in capsys.readouterr().err
    for name in ("RINGMASTER_DATABASE", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "sqlite:///x")
    assert metrics_server.main(["--port", "1"]) == 2
    assert "the metrics need the pool's password" in capsys.readouterr().err
