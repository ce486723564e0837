"""The servers of a test's pool, each of which can be stopped and restarted at its address."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

from ringmaster.model_lineage import QUIET_ENVIRONMENT
from tests.cluster.machines import end
from tests.cluster.waiting import TIMEOUT_S, until
from tests.ports import free_port


class Server:
    """A server process with an address. command: starts it; health: a path that responds once it is up."""

    def __init__(self, folder, *, name, url, command, health, environment):
        self.url, self._name, self._health, self._command = url, name, health, command
        self._log, self._environment = folder / f"{name}.log", environment
        self._process = None

    def start(self):
        """Starts the server, and returns once it answers."""
        self.launch()
        until(f"{self._name} answers", self.answers)
        return self

    def launch(self):
        """Starts the server without waiting for it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def answers(self):
        """Returns whether the server is up; raises where its process has ended."""
        assert self._process.poll() is None, f"{self._name} has ended: {self._log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(self.url + self._health, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def call(self, method, path, body=None):
        """Returns the response of the server's API to a request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/api{path}", method=method, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read() or b"null")

    def stop(self):
        """Stops the server, as an upgrade does."""
        if self._process is not None:
            end(self._process)
            self._process = None


def prefect_server(folder, address, *, database):
    """Returns a Prefect server on PostgreSQL; its `url` lacks the "/api"."""
    port = free_port(address)
    environment = {
        **os.environ,
        **QUIET_ENVIRONMENT,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_API_DATABASE_CONNECTION_URL": database.replace("postgresql://", "postgresql+asyncpg://", 1),
        "PYTHONSAFEPATH": "1",
    }
    environment.pop("PREFECT_API_URL", None)
    (folder / "prefect").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", address, "--port", str(port)]
    return Server(
        folder,
        name="prefect",
        url=f"http://{address}:{port}",
        command=command,
        health="/api/health",
        environment=environment,
    )


def mlflow_server(folder, address):
    """Returns an MLflow server on SQLite that also stores artifacts."""
    port = free_port(address)
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", address, "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/files"]
    command += ["--allowed-hosts", f"{address}:{port}"]
    environment = {**os.environ, **QUIET_ENVIRONMENT, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return Server(
        folder,
        name="mlflow",
        url=f"http://{address}:{port}",
        command=command,
        health="/health",
        environment=environment,
    )
