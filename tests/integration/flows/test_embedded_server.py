"""The embedded Prefect server of a run without a pool: closed to other users, and stopped with the run."""

import subprocess
import sys

import psutil
import pytest

from tests.attacks import expect_closed_prefect

# A process like a run's: it starts the server, prints how to reach it, and gets no chance to stop it.
RUN = """
import os
from ringmaster.flows import settings
settings.embed(settings.home())
import ringmaster.flows.train_batch
from prefect.server.api.server import SubprocessASGIServer
server = SubprocessASGIServer()
server.start()
print(server.api_url, os.environ["PREFECT_API_AUTH_STRING"], server.server_process.pid, flush=True)
input()
"""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_it_serves_its_run_alone_and_ends_when_that_is_killed(tmp_path, monkeypatch):
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        try:
            api, user, pid = run.stdout.readline().split()
            server = psutil.Process(int(pid))
            expect_closed_prefect(api, user=user)
        finally:
            run.kill()
    assert psutil.wait_procs([server], timeout=60) == ([server], [])
