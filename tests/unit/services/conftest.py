import subprocess
import sys

import pytest

from ringmaster.tasks.process_identity import ProcessId
from tests.unit.services.pool_home import PoolHome


@pytest.fixture
def start():
    """A function that starts a process that waits; all are killed in the end."""
    started = []

    def start():
        command = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        return ProcessId.of(process.pid)

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def home(tmp_path, start, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    return PoolHome(tmp_path / "home", start)
