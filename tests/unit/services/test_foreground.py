"""`ringmaster up` of a pool that is up already: what it says of its options, and `--wait`, which stays."""

import json
import os
import signal
import subprocess
import sys

import pytest

from ringmaster.codec import to_json
from ringmaster.flows import settings
from ringmaster.flows.services import up_and_down
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.pool.engines import Service
from tests.matrix import matrix

LIVES = "import signal; signal.pause()"


@pytest.fixture
def home(tmp_path):
    """A home whose pool is up: its one service does nothing."""
    address = PoolAddress(database=f"sqlite:///{tmp_path}/pool.db", prefect_api="http://p/api", mlflow_uri="http://m")
    files = up_and_down.files_of(tmp_path)
    files.make()
    services = [Service(name="one", command=(sys.executable, "-c", LIVES), environment={})]
    files.write_services(services, address=address)
    supervisor = up_and_down._supervise(files)
    settings.pool_file(tmp_path).write_text(json.dumps(to_json(address)))
    while not files.states() or files.states()[0].pid is None:
        assert not supervisor.wait(0.05)
    yield tmp_path
    up_and_down.stop(tmp_path)


def up(home, *options):
    """Starts `up`. Interrupts are ignored where the tests run in the background, and here they are sent."""
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "ringmaster.flows.entry", "up", *options],
        env={**os.environ, "RINGMASTER_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def waiting(home):
    """Starts `up --wait`; returns once it waits."""
    process = up(home, "--wait")
    for line in process.stderr:
        if "SIGTERM or Ctrl-C ends it" in line:
            return process
    raise AssertionError("it has ended")


@pytest.mark.parametrize("number", matrix([signal.SIGTERM, signal.SIGINT], quick=[signal.SIGTERM]))
def test_it_stays_until_a_signal_and_then_ends_the_pool(home, number):
    process = waiting(home)
    process.send_signal(number)
    assert "the pool is down" in process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert up_and_down.files_of(home).supervisor() is None and not settings.pool_file(home).exists()


def test_it_ends_with_the_pool(home):
    process = waiting(home)
    assert up_and_down.stop(home)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_it_ends_with_an_error_where_the_supervisor_dies(home):
    process = waiting(home)
    os.kill(up_and_down.files_of(home).supervisor().pid, signal.SIGKILL)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "the supervisor has died" in said and "To fix: " in said


def test_options_that_have_no_effect_are_named(home):
    assert "without effect" not in up(home).communicate(timeout=60)[1]
    said = up(home, "--engine", "slurm", "--budget", "300").communicate(timeout=60)[1]
    assert "--engine, --budget without effect. To fix: `ringmaster down`" in said
