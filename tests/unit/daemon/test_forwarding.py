"""A forwarded command has the terminal, folder, environment and signals of the process that forwards it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from ringmaster.techniques.processes.forkserver_client import ForkServer

TIMEOUT_S = 120
FORWARD = """
import sys
import time
from ringmaster.features.daemon.resident import KeptProcesses
from ringmaster.features.daemon.forwarding import _forwarded
sys.exit(_forwarded(sys.argv[2:], KeptProcesses(fork_server="", commands=sys.argv[1])))
"""


@pytest.fixture(scope="module")
def server():
    """A server that forks commands, with the imports of the one that tests run."""
    flows = "ringmaster.flows"
    preload = ("ringmaster.features.daemon.forwarded:main", f"{flows}.cli:app", f"{flows}.commands.running:run")
    with closing(ForkServer(base=(), preload=preload).start()) as server:
        yield server


@pytest.fixture
def forward(server, tmp_path):
    """Starts a process that forwards a command, in a folder of its own."""
    every = []

    def forward(*arguments, **options):
        process = subprocess.Popen(
            [sys.executable, "-c", FORWARD, str(server.socket_path), *arguments],
            cwd=tmp_path,
            text=True,
            env={**os.environ, "RINGMASTER_HOME": str(tmp_path / "home")},
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
        )
        every.append(process)
        return process

    yield forward
    for process in every:
        process.kill()
        process.communicate()


@pytest.fixture
def waiting(tmp_path, server, forward):
    """A forwarded command that reads a batch file which nobody writes, and its process."""
    os.mkfifo(tmp_path / "batch.yaml")
    client = forward("run", "batch.yaml")
    writer = os.open(tmp_path / "batch.yaml", os.O_WRONLY)  # until the command reads
    (command,) = psutil.Process(server._process.pid).children()
    yield client, command
    os.close(writer)


def test_it_has_the_folder_and_the_files_of_the_command_and_its_exit_status(forward):
    output, faults = forward("run", "missing.yaml").communicate(timeout=TIMEOUT_S)
    assert "missing.yaml" in faults
    assert "Traceback" not in faults
    assert not output


def test_it_has_the_exit_status_of_the_command(forward, tmp_path):
    (tmp_path / "batch.yaml").write_text("jobs: []\n")
    client = forward("run", "batch.yaml")
    client.communicate(timeout=TIMEOUT_S)
    assert client.returncode == 2


def test_a_terminal_stays_one(forward, tmp_path):
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        client = forward("run", "missing.yaml", stderr=theirs)
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += terminal.read(4096)
            except OSError:  # the last process has closed it
                break
        client.wait(TIMEOUT_S)
    assert b"\x1b[" in shown, "only a terminal gets codes"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_which_ends_in_order(waiting, number):
    client, _ = waiting
    client.send_signal(number)
    _, faults = client.communicate(timeout=TIMEOUT_S)
    assert client.returncode == 128 + number
    assert "stopping: writing checkpoints" in faults
    assert "to continue: ringmaster run batch.yaml --resume" in faults


def test_the_command_ends_with_the_process_that_forwards_it(waiting):
    client, command = waiting
    client.kill()
    psutil.wait_procs([command], TIMEOUT_S)
    assert not command.is_running()


def test_a_command_that_is_killed_is_reported(waiting):
    client, command = waiting
    command.kill()
    client.communicate(timeout=TIMEOUT_S)
    assert client.returncode == 128 + signal.SIGKILL


def test_ctrl_z_stops_both_and_continues_both(waiting):
    client, command = waiting
    client.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(client.pid, os.WUNTRACED)[1])
    deadline_s = time.monotonic() + TIMEOUT_S
    while command.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline_s:
        os.sched_yield()
    assert command.status() == psutil.STATUS_STOPPED
    client.send_signal(signal.SIGCONT)
    client.send_signal(signal.SIGTERM)
    client.communicate(timeout=TIMEOUT_S)
    assert client.returncode == 128 + signal.SIGTERM
