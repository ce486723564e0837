"""Scratch folders are removed with their owner. Only folders whose process provably ended are removed."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ringmaster.techniques.processes import forkserver_client
from ringmaster.techniques.processes.forkserver_client import (
    OWNER,
    ForkServer,
    ForkServerClient,
    ScratchFolder,
    remove_stale,
)

OWNS = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from ringmaster.techniques.processes.forkserver_client import ScratchFolder
folder = ScratchFolder()
(folder.path / "log").write_text("said")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_there_until_it_is_closed(temporary):
    with ScratchFolder(prefix="ringmaster-scores-") as folder:
        assert folder.path.parent == temporary and folder.path.name.startswith("ringmaster-scores-")
        remove_stale()
        assert names(folder.path) == [OWNER]
    assert names(temporary) == []


def test_what_a_killed_process_has_left_is_removed_by_the_next_and_not_before_it_is_dead(temporary):
    command = [sys.executable, "-c", OWNS, str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        path = Path(process.stdout.readline().strip())
        remove_stale()
        assert names(path) == ["log", OWNER]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.is_dir()
        with ScratchFolder() as folder:
            assert names(temporary) == [folder.path.name]


def test_folders_of_whom_nothing_is_known_are_left_alone(temporary, monkeypatch):
    for name in ("ringmaster-without-owner", "ringmaster-somebody-elses", "another-program"):
        (temporary / name).mkdir()
    for name in ("ringmaster-somebody-elses", "another-program"):
        (temporary / name / OWNER).touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).touch()
    (temporary / "ringmaster-link").symlink_to(elsewhere)
    linked = temporary / "ringmaster-linked-owner"
    linked.mkdir()
    (linked / OWNER).symlink_to(elsewhere / OWNER)
    (temporary / "ringmaster-file").touch()
    before = names(temporary)
    with monkeypatch.context() as patch:
        patch.setattr(forkserver_client.os, "geteuid", lambda: os.getuid() + 1)
        remove_stale()
        assert names(temporary) == before, "of another user"
    remove_stale()
    assert names(temporary) == [name for name in before if name != "ringmaster-somebody-elses"]
    assert names(elsewhere) == [OWNER]


def test_a_fork_server_that_is_still_being_started_is_ended_at_once_with_its_folder(temporary):
    server, ends = ForkServer(), []

    def start():
        try:
            server.start()
        except RuntimeError as error:
            ends.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    while (starting := server._starting) is None:
        assert thread.is_alive()
    server.close()
    thread.join()
    assert ends and starting.returncode == -signal.SIGKILL
    assert names(temporary) == []


def test_a_fork_server_listens_in_a_temporary_folder_of_any_length(tmp_path, monkeypatch):
    (tmp_path / ("x" * 120)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    server = ForkServer()
    with contextlib.closing(server), server._listen() as listener:
        ForkServerClient(server._socket_path)._connect().close()
        listener.accept()[0].close()
