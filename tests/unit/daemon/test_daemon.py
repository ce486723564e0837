"""A daemon keeps the servers of a command for the next one, and ends with all of them where that would be wrong."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ringmaster.codec import to_json
from ringmaster.features.daemon import daemon, resident
from ringmaster.features.daemon.daemon import Daemon
from ringmaster.features.daemon.resident import daemon_of, record_file, take
from ringmaster.flows.resident_processes import resident_processes
from ringmaster.tasks.process_identity import ProcessId
from ringmaster.techniques.processes.forkserver_client import ForkServer

TIMEOUT_S = 120
WAIT = "import sys; sys.stdin.read()"
PREFECT = {"api": "http://x/api", "user": "a:b"}
PLACE = "tests.unit.daemon.targets:place"


@pytest.fixture(autouse=True)
def commands(monkeypatch):
    """Commands of one environment, on a terminal; the server of commands loads nothing."""
    monkeypatch.setattr(daemon, "COMMAND_IMPORTS", ())
    monkeypatch.setattr(daemon, "CHECKED_FOR_S", 0.0)
    monkeypatch.setattr(resident, "stay_seconds", lambda: 600.0)
    monkeypatch.setattr(resident, "environment_digest", lambda: "same")
    monkeypatch.setattr(resident, "is_known", lambda: True)
    monkeypatch.setattr(resident, "END_TIMEOUT_S", 0.0)  # the daemon is a thread of this process
    # A daemon that is closing does not answer, and would be ended: this process.
    end = ProcessId.end
    monkeypatch.setattr(ProcessId, "end", lambda self, **how: self.pid != os.getpid() and end(self, **how))


@pytest.fixture
def left(tmp_path):
    """Starts daemons that keep a fork server and a process for Prefect's; all have ended at the end of the test."""
    every = []

    def left(*, home=tmp_path, stay_s=600.0, preload=()):
        server = ForkServer(base=(), preload=preload).start()
        prefect = subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE)
        owner = server._process
        running = server.hand_over()
        order = {
            "home": str(home),
            "digest": "same",
            "stay_s": stay_s,
            "fork_server": to_json(running) | {"stdin": os.dup(running.stdin), "lock": os.dup(running.lock)},
            "prefect": {"pid": prefect.pid, "stdin": os.dup(prefect.stdin.fileno()), **PREFECT},
        }
        for file in (prefect.stdin, owner.stdin, server._folder._lock):  # as a command that ends closes them
            file.close()
        kept = Daemon(order)
        thread = threading.Thread(target=kept.run)
        result = SimpleNamespace(daemon=kept, thread=thread, prefect=prefect, running=running)
        every.append(result)
        return result

    yield left
    for each in every:
        if each.thread.is_alive():
            resident_processes().end(each.daemon._home)
        each.thread.join(TIMEOUT_S)
        assert not each.thread.is_alive()
        assert each.prefect.wait(TIMEOUT_S) is not None
        assert not Path(each.running.folder).exists()


def start(kept):
    """Runs a daemon until it can be found."""
    opened, is_open = kept.daemon._open, threading.Event()

    def open_and_tell():
        try:
            opened()
        finally:
            is_open.set()

    kept.daemon._open = open_and_tell
    kept.thread.start()
    assert is_open.wait(TIMEOUT_S)


def ends(kept):
    kept.thread.join(TIMEOUT_S)
    return not kept.thread.is_alive() and kept.prefect.wait(TIMEOUT_S) is not None


def test_the_next_command_takes_over_what_runs_with_its_own_folder_and_environment(left, tmp_path, monkeypatch):
    start(left())
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SSH_AUTH_SOCK", "of the new terminal")
    with closing(take(tmp_path)) as kept, closing(ForkServer(kept=kept_socket(kept))) as server:
        assert (kept.processes.prefect_api, kept.processes.prefect_user) == tuple(PREFECT.values())
        assert place(server, tmp_path) == [str(folder), "of the new terminal"]
        assert server._process is None, "no server of its own"


def kept_socket(kept):
    return Path(kept.processes.fork_server)


def place(server, folder):
    with closing(server.spawn(target=PLACE, argument=None, log=folder / "log")) as channel:
        while "place" not in (message := channel.receive()):
            assert message["event"] == "started", (folder / "log").read_text()
        return message["place"]


def test_two_commands_use_it_at_once_and_it_ends_after_both(left, tmp_path, monkeypatch):
    monkeypatch.setattr(resident, "stay_seconds", lambda: 1e-9)  # what the newest command says counts
    kept = left()
    start(kept)
    first, second = take(tmp_path), take(tmp_path)
    first.close()
    assert "a command uses it" in resident_processes().status(tmp_path)
    second.close()
    assert ends(kept)
    assert daemon_of(tmp_path) is None
    assert not record_file(tmp_path).exists()


def test_it_ends_by_itself_after_its_time(left, tmp_path):
    kept = left(stay_s=0.01)
    start(kept)
    assert ends(kept)
    assert take(tmp_path) is None


def test_a_command_of_another_environment_ends_it(left, tmp_path, monkeypatch):
    kept = left()
    start(kept)
    monkeypatch.setattr(resident, "environment_digest", lambda: "other")
    assert take(tmp_path) is None
    assert ends(kept)


def test_a_command_of_another_environment_leaves_it_to_the_command_that_uses_it(left, tmp_path, monkeypatch):
    kept = left()
    start(kept)
    used = take(tmp_path)
    monkeypatch.setattr(resident, "environment_digest", lambda: "other")
    assert take(tmp_path) is None
    assert kept.prefect.poll() is None
    used.close()
    assert ends(kept)


def test_a_changed_file_ends_it(left, tmp_path, monkeypatch):
    module = tmp_path / "installed.py"
    module.write_text("value = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kept = left(preload=("installed:value",))
    start(kept)
    with closing(take(tmp_path)):
        pass
    module.write_text("value = 2\n")
    assert take(tmp_path) is None
    assert ends(kept)


@pytest.mark.parametrize("victim", ["prefect", "server"])
def test_it_ends_where_a_server_was_killed(left, tmp_path, victim):
    kept = left()
    start(kept)
    psutil.Process(kept.running.pid if victim == "server" else kept.prefect.pid).kill()
    assert ends(kept)
    assert take(tmp_path) is None


def test_a_command_whose_server_is_killed_starts_its_own(left, tmp_path):
    start(left())
    with closing(take(tmp_path)) as kept, closing(ForkServer(base=(), kept=kept_socket(kept))) as server:
        place(server, tmp_path)
        resident_processes().end(tmp_path)
        killed = psutil.Process(left_pid(server, tmp_path))
        killed.kill()
        psutil.wait_procs([killed], TIMEOUT_S)
        assert place(server, tmp_path)[0] == str(Path.cwd())
        assert server._process is not None


def left_pid(server, folder):
    """Returns the process of the kept server: the parent of its children."""
    with closing(server.spawn(target=PLACE, argument="parent", log=folder / "log")) as channel:
        while "place" not in (message := channel.receive()):
            pass
        return message["place"]


def test_down_ends_it_and_says_so(left, tmp_path):
    kept = left()
    start(kept)
    assert "fork server, Prefect's server" in resident_processes().status(tmp_path)
    resident_processes().end(tmp_path)
    assert ends(kept)
    assert (resident_processes().end(tmp_path), resident_processes().status(tmp_path)) == ("", "")


def test_it_ends_where_its_home_is_gone_or_names_another(left, tmp_path, monkeypatch):
    monkeypatch.setattr(daemon, "CHECK_EVERY_S", 0.05)
    kept = left()
    start(kept)
    record_file(tmp_path).write_text(json.dumps({"pid": 1, "born": "another", "socket": "/nowhere"}))
    assert ends(kept)
    assert record_file(tmp_path).exists(), "the record of the other stays"


def test_it_ends_where_memory_is_short(left, monkeypatch):
    monkeypatch.setattr(daemon, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9, total=100))
    kept = left()
    start(kept)
    assert ends(kept)


def test_it_ends_where_the_disk_is_full(left, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(daemon, "write_secret", full)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    kept = left()
    start(kept)
    assert ends(kept)


def test_a_record_of_a_process_that_has_ended_is_none(tmp_path):
    record_file(tmp_path).write_text(json.dumps({"pid": os.getpid(), "born": "earlier", "socket": "/nowhere"}))
    assert daemon_of(tmp_path) is None
    assert (take(tmp_path), resident_processes().status(tmp_path), resident_processes().end(tmp_path)) == (None, "", "")


def test_a_record_of_another_user_is_none(left, tmp_path, monkeypatch):
    start(left())
    assert daemon_of(tmp_path) is not None
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 4242)
        assert take(tmp_path) is None


def test_a_request_that_is_none_is_ignored(left, tmp_path):
    kept = left()
    start(kept)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(daemon_of(tmp_path).socket)
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        assert stranger.recv(100) == b""
    with closing(take(tmp_path)) as used:
        assert used is not None
