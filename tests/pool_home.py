"""A pool for a test, started and stopped by `ringmaster`, and requests to its servers."""

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from ringmaster.flows.services.service_files import ServiceFiles
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.process_identity import ProcessId
from tests.cluster.waiting import until
from tests.ports import free_port

UP_TIMEOUT_S = 1000  # longer than the timeouts of `up`
END_TIMEOUT_S = 300
ANSWER_TIMEOUT_S = 120

# A pool is found by its home alone. Settings of another pool must not be inherited.
FOREIGN = ("RINGMASTER_", "PREFECT_", "MLFLOW_TRACKING_")

BATCH = """
name: night
jobs:
  - name: vit
    model:
      architecture: ViTForImageClassification
      config: {patch_size: 2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
    data: {source: digits}
    global_batch_size: 8
    num_steps: 4
    techniques: [single]
    num_devices: [1]
"""


class Home:
    """A home with its own pool, on free ports."""

    def __init__(self, folder):
        self.folder, self.files = folder, ServiceFiles(folder / "pool")
        port = free_port()
        self.ports = port, free_port(but=[port])
        self.port_metrics = free_port(but=self.ports)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.environment["RINGMASTER_HOME"] = str(folder)

    def ringmaster(self, *arguments):
        command = [sys.executable, "-m", "ringmaster.flows.entry", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=UP_TIMEOUT_S
        )

    def up(self, *arguments):
        return self.ringmaster(*self.up_words(), *arguments)

    def up_words(self):
        """The words of `up` on the free ports."""
        prefect, mlflow = self.ports
        ports = {"prefect": prefect, "mlflow": mlflow, "metrics": self.port_metrics}
        return ["up", *(word for name, port in ports.items() for word in (f"--port-{name}", str(port)))]

    def down(self):
        return self.ringmaster("down")

    def run_batch(self, *, logs=()):
        """Trains and records a batch of one small job on the pool; returns the job. Shows `logs` where it fails."""
        file = self.folder / "night.yaml"
        file.write_text(BATCH)
        done = self.ringmaster("run", str(file), "--json")
        assert done.returncode == 0, "\n".join([done.stderr, *(log.read_text() for log in logs)])
        result = json.loads(done.stdout)
        (job,) = result["jobs"]
        assert (result["faults"], job["status"]) == ([], "done")
        return job

    def states(self):
        return {state.name: state for state in self.files.states()}

    def address(self):
        return PoolAddress(**json.loads((self.folder / "pool.json").read_text()))

    @property
    def user(self):
        """USER:PASSWORD of both servers."""
        address = self.address()
        return f"{address.username}:{address.password}"

    def ask(self, url, *, body=None, method=None):
        """Sends a request with the password, like the function `ask`."""
        return ask(url, user=self.user, body=body, method=method)

    def wait_until_nobody_is_left(self):
        """Waits until all processes of the pool have ended, which takes moments after its servers and nodes."""
        until("nobody is left", lambda: not self.processes(), seconds=END_TIMEOUT_S)

    def processes(self):
        """All live processes of this home's pool."""
        mark = f"RINGMASTER_HOME={self.folder}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(ProcessId.of(int(folder.name)))
            except OSError:
                continue
        return [process for process in found if process is not None]

    def command_lines(self):
        """The command lines of these processes, which every user of the machine can read."""
        found = []
        for process in self.processes():
            with suppress(OSError):  # it has ended
                found.append(Path(f"/proc/{process.pid}/cmdline").read_text())
        return found


def ask(url, *, user=None, body=None, method=None):
    """The status and the JSON of a server's answer.

    Requests are retried while the server is busy: Prefect on SQLite may answer that it is unavailable, and a server of
    a busy machine may not answer.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}, method=method)
    if user:
        request.add_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")

    def poll():
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            return None if error.code == HTTPStatus.SERVICE_UNAVAILABLE else (error.code, None)
        except OSError:
            return None

    return until(f"{url} answers", poll, seconds=ANSWER_TIMEOUT_S)
