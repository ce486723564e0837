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
settings.prepare_environment(settings.home())
import ringmaster.flows.train_batch
import psutil
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
from ringmaster.flows.batch.embedded_prefect import embedded_server
assert not psutil.Process().children() and PREFECT_API_URL.value() is None  # an import starts nothing
with embedded_server(), get_client(sync_client=True) as client:
    client.read_flows()
    (server,) = psutil.Process().children()
    print(PREFECT_API_URL.value(), PREFECT_API_AUTH_STRING.value(), server.pid, flush=True)
    assert "PREFECT_API_AUTH_STRING" not in os.environ
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
