"""The fork server: it runs its targets, and leaves no process behind, however its owner ends."""

import os
import re
import select
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest

from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.caches import CODE_CACHES
from ringmaster.techniques.processes.forkserver import seconds_since_boot
from ringmaster.techniques.processes.forkserver_client import ForkServer, ForkServerClient
from ringmaster.techniques.processes.gang_events import OutcomeStatus
from tests.integration.workbench import SINGLE, Workbench


@pytest.fixture(scope="module", autouse=True)
def nothing_preloaded():
    """Preloads nothing: these workers need no torch, whose import takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringmaster.techniques.processes.forkserver_client.PRELOAD", ())
        yield


@pytest.fixture(scope="module")
def server():
    with ForkServer() as running:
        yield running


def spawn(server, tmp_path, name, argument=None):
    return server.spawn(target=f"tests.integration.targets:{name}", argument=argument, log=tmp_path / "log")


def wait_for(channel, event):
    while (message := channel.receive())["event"] != event:
        pass
    return message


def wait_until_gone(pid, timeout_s=60):
    """Waits for the end of a process that may not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], timeout_s)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)


def test_a_worker_gets_its_argument_and_commands(server, tmp_path):
    with closing(spawn(server, tmp_path, "echo", {"x": [1, 2]})) as channel:
        channel.send({"command": "go"})
        assert wait_for(channel, "echo") == {"event": "echo", "argument": {"x": [1, 2]}, "command": "go"}
        assert wait_for(channel, "exit")["status"] == 0
        with pytest.raises(ChannelClosed):
            channel.receive()


def test_where_no_process_can_be_started_the_server_goes_on(tmp_path):
    log = tmp_path / "server.log"
    with ForkServer(log=log, preload=("tests.integration.no_room:fork",)) as server:
        with closing(spawn(server, tmp_path, "echo")) as channel, pytest.raises(ChannelClosed):
            channel.receive()
        with closing(spawn(server, tmp_path, "fail")) as channel:
            assert wait_for(channel, "exit")["status"] == 1
    assert "no process can be started: " in log.read_text()


def test_nothing_lies_at_a_name_that_others_could_foresee(tmp_path, monkeypatch):
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    shared.chmod(0o1777)  # as /tmp
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("RINGMASTER_HOME", str(home))
    for name in CODE_CACHES:
        monkeypatch.delenv(name, raising=False)
    with ForkServer() as server, closing(spawn(server, tmp_path, "write_to_caches")) as channel:
        folders = wait_for(channel, "folders")
        assert wait_for(channel, "exit")["status"] == 0
        (own,) = shared.iterdir()
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert re.fullmatch(r"ringmaster-\w{8}", own.name)  # drawn at random
        assert folders["temporary"] == str(own)
        assert all(Path(folder).is_relative_to(home) for folder in folders["code"])
    assert not list(shared.iterdir())


def test_a_failure_leaves_its_trace_in_the_log(server, tmp_path):
    with closing(spawn(server, tmp_path, "fail")) as channel:
        assert wait_for(channel, "exit")["status"] == 1
    assert "RuntimeError: as it should" in (tmp_path / "log").read_text()


def test_a_signal_is_told_as_a_negative_status(server, tmp_path):
    with closing(spawn(server, tmp_path, "die")) as channel:
        assert wait_for(channel, "exit")["status"] == -signal.SIGKILL


def test_sigterm_to_all_processes_ends_only_programs_that_workers_start(tmp_path):
    """Slurm sends it to every process of a job, of which only the owner decides when its workers end."""
    with ForkServer() as server, closing(spawn(server, tmp_path, "linger")) as channel:
        worker, program = wait_for(channel, "lingering")["pids"]
        pids = [psutil.Process(worker).ppid(), worker, program]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        wait_until_gone(program)
        with closing(spawn(server, tmp_path, "echo")) as another:
            another.send({"command": "go"})
            assert wait_for(another, "echo")["command"] == "go"
        channel.hang_up()
        assert wait_for(channel, "exit")["status"] == -signal.SIGKILL


def test_hanging_up_ends_a_worker_and_its_children(server, tmp_path):
    with closing(spawn(server, tmp_path, "linger")) as channel:
        pids = wait_for(channel, "lingering")["pids"]
        channel.hang_up()
        assert wait_for(channel, "exit")["status"] == -signal.SIGKILL
    for pid in pids:
        wait_until_gone(pid)


def test_a_worker_that_ends_while_it_is_hung_up_takes_nobody_with_it(tmp_path):
    """A server that was not scheduled for a while sees both ends in one iteration of its loop."""
    with (
        ForkServer() as server,
        closing(spawn(server, tmp_path, "linger")) as bystander,
        closing(spawn(server, tmp_path, "linger")) as channel,
    ):
        wait_for(bystander, "lingering")
        pid = wait_for(channel, "lingering")["pids"][0]
        server_pid = psutil.Process(pid).ppid()
        os.kill(server_pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        channel.hang_up()
        os.kill(server_pid, signal.SIGCONT)
        assert wait_for(channel, "exit")["status"] == -signal.SIGKILL
        assert psutil.Process(server_pid).is_running()
        bystander.hang_up()
        assert wait_for(bystander, "exit")["status"] == -signal.SIGKILL


OWNER = """
import sys
from pathlib import Path
from ringmaster.techniques.processes.forkserver_client import ForkServer, ForkServerClient
server = ForkServer().start()
channel = server.spawn(target="tests.integration.targets:linger", argument=None, log=Path(sys.argv[1]))
while (message := channel.receive())["event"] != "lingering":
    pass
print(*message["pids"], flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_nobody_survives_an_owner_that_was_killed(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.kill()
    owner.wait()
    for pid in pids:
        wait_until_gone(pid)
    owner.stdin.close()
    owner.stdout.close()


def test_nobody_survives_a_server_that_was_killed(tmp_path):
    with ForkServer() as server:
        channel = spawn(server, tmp_path, "linger")
        worker, _ = wait_for(channel, "lingering")["pids"]
        server_pid = psutil.Process(worker).ppid()
        os.kill(server_pid, signal.SIGKILL)
        wait_until_gone(worker)
        with pytest.raises(ChannelClosed):
            channel.receive()
        channel.close()
        killed = server._process
        with closing(spawn(server, tmp_path, "fail")) as channel:
            assert wait_for(channel, "exit")["status"] == 1  # by a restarted server
        assert server._process is not killed and killed.stdin.closed
        last = server._process
        last.kill()
        last.wait()
    assert last.stdin.closed, "a server that has ended by itself leaves no pipe behind"


@contextmanager
def fenced_soon(tmp_path, *, beside=()):
    """Yields a server whose owner stops ticking, a worker's channel, its process ids, and a gang.

    The time to the fence grows where a busy machine has not started them in time. beside: targets of further workers,
    whose channels are not read.
    """
    for open_s in (10, 40, 160):
        with ForkServer(fence_after_s=0.2) as server:
            bench = Workbench(server, tmp_path)
            server.tick(seconds_since_boot() + open_s)  # the only tick
            with ExitStack() as stack:
                for target in beside:
                    stack.enter_context(closing(spawn(server, tmp_path, target)))
                lingering = stack.enter_context(closing(spawn(server, tmp_path, "linger")))
                gang = bench.start(bench.order(bench.job(num_steps=1_000_000), SINGLE, tmp_path))
                try:
                    pids = wait_for(lingering, "lingering")["pids"]
                    has_started = gang._ranks[0].channel.receive()["event"] == "started"
                except ChannelClosed:
                    gang.wait(lambda event: None)
                    continue
                assert has_started
                yield server, lingering, pids, gang
                return
    raise AssertionError("no worker could be started")


@pytest.mark.full
def test_the_fence_ends_the_workers_of_a_silent_owner_and_opens_again(tmp_path):
    with fenced_soon(tmp_path) as (server, lingering, _, gang):
        assert gang.wait(lambda event: None).status == OutcomeStatus.LOST
        exit = wait_for(lingering, "exit")
        assert (exit["status"], exit["fenced"]) == (-signal.SIGKILL, True)
        with closing(spawn(server, tmp_path, "fail")) as refused, pytest.raises(ChannelClosed):
            refused.receive()
        server.tick(seconds_since_boot() + 60)
        with closing(spawn(server, tmp_path, "fail")) as failing:
            exit = wait_for(failing, "exit")
        assert (exit["status"], exit["fenced"]) == (1, False)


@pytest.mark.full
def test_the_fence_holds_for_an_owner_that_reads_nothing_any_more(tmp_path):
    with fenced_soon(tmp_path, beside=["flood"]) as (_, _, pids, gang):  # its exit event cannot be read
        for pid in pids:
            wait_until_gone(pid)
        assert gang.wait(lambda event: None).status == OutcomeStatus.LOST


def test_a_server_starts_when_it_is_needed_serves_other_processes_and_ends_when_it_is_idle(tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.techniques.processes.forkserver_client.IDLE_AFTER_S", 0.2)
    with closing(ForkServer(log=tmp_path / "server.log")) as server:
        server.start_when_needed(link=tmp_path / "link")
        assert server._process is None
        client = ForkServerClient((tmp_path / "link").readlink())
        assert client.start() is client  # only makes it start
        for _ in range(2):  # the second time after it has ended
            with closing(spawn(client, tmp_path, "echo")) as channel:
                channel.send({"command": "go"})
                assert wait_for(channel, "echo")["command"] == "go"
            wait_until_gone(server._process.pid)
    assert (tmp_path / "server.log").read_text() == ""
    with pytest.raises(OSError, match="No such file"):
        spawn(client, tmp_path, "echo")


def test_a_server_that_cannot_start_refuses_those_who_wait_for_it(tmp_path):
    with closing(ForkServer(preload=("tests.integration.targets:nowhere",))) as server:
        server.start_when_needed(link=tmp_path / "link")
        client = ForkServerClient((tmp_path / "link").readlink())
        for _ in range(2):
            with closing(spawn(client, tmp_path, "echo")) as channel, pytest.raises(ChannelClosed):
                channel.receive()
