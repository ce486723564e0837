import subprocess

import pytest

from ringmaster.tasks.process_identity import ProcessId
from tests.unit.services.pool_home import PoolHome


@pytest.fixture
def start():
    """A function that starts a process that waits; all are killed in the end."""
    started = []

    def start():
        started.append(subprocess.Popen(["sleep", "infinity"]))
        return ProcessId.of(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def home(tmp_path, start, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    return PoolHome(tmp_path / "home", start)
