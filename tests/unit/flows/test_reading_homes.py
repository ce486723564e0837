"""Commands that read need no more than the right to read a home, create nothing, and name a right that is missing."""

import json
import sqlite3
import sys

import pytest

from ringmaster.files import storage_fault
from ringmaster.flows.dated_runs import runs_below
from ringmaster.tasks.storage.journal import JobStatus, Journal
from tests.command_server import READING, CommandServer
from tests.ports import free_port
from tests.readers import close_to_writers, dropping_rights, files_in, open_to_writers, reading_by, without_rights

RUN = "20261101-120000"


@pytest.fixture(scope="module")
def read_command(tmp_path_factory):
    """Runs a command as a user who may write nothing in a home."""
    folder = tmp_path_factory.mktemp("printed")
    with CommandServer(folder, preload=READING, words=dropping_rights()) as server:
        yield reading_by(server)


@pytest.fixture
def home(tmp_path):
    """A home with the finished runs of two batches."""
    home = tmp_path / "home"
    for batch in ("first", "second"):
        run = home / "batches" / batch / RUN
        journal = Journal.of_file(run / "journal.db")
        journal.put("batch", {"jobs": [{"name": "a", "num_steps": 7}]})
        journal.write_job("a", status=JobStatus.DONE, step=7)
        journal.close()
        (run / "lock").touch()
        gang = run / "gangs" / "0001-a"
        gang.mkdir(parents=True)
        (gang / "rank-0.log").write_text(f"a of {batch} trains\n")
    home.chmod(0o700)
    yield home
    open_to_writers(home)


def test_a_home_that_may_only_be_read_is_shown_and_stays_as_it_is(home, read_command):
    before = close_to_writers(home)
    status = read_command(home, "status", "--json")
    assert (status.returncode, status.stderr) == (0, "")
    assert [(row["batch"], row["status"], row["step"]) for row in json.loads(status.stdout)] == [
        ("first", "done", 7),
        ("second", "done", 7),
    ]
    logs = read_command(home, "logs", "first", "a")
    assert (logs.returncode, logs.stdout) == (0, "a of first trains\n")
    watched = read_command(home, "watch", "first", "--once", "--json")
    assert watched.returncode == 0, watched.stderr
    assert json.loads(watched.stdout)["name"] == "first"
    assert files_in(home) == before


def test_a_journal_that_may_not_be_read_is_named_and_hides_no_other_batch(home, read_command):
    journal = home / "batches" / "first" / RUN / "journal.db"
    journal.chmod(0o200)
    status = read_command(home, "status", "--json")
    assert status.returncode == 1
    assert [row["batch"] for row in json.loads(status.stdout)] == ["second"]
    assert status.stderr.startswith(f"{journal} cannot be read: this user lacks the right r. To fix: ")
    assert status.stderr.count("\n") == 1
    watched = read_command(home, "watch", "first", "--once")
    assert (watched.returncode, watched.stdout, watched.stderr) == (1, "", status.stderr)


@pytest.mark.parametrize(
    ("mode", "fault", "commands"),
    [
        (0o600, "entered: this user lacks the right x", (["status"], ["logs", "a"], ["watch", "--once"])),
        (0o300, "read: this user lacks the right r", (["status"],)),
    ],
)
def test_a_folder_that_may_not_be_read_is_no_empty_one(home, mode, fault, commands, read_command):
    batches = home / "batches"
    batches.chmod(mode)
    for command in commands:
        result = read_command(home, *command)
        assert (result.returncode, result.stdout) == (1, "")
        assert f"cannot be {fault}" in result.stderr and str(batches) in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_command_that_writes_ends_with_one_line(home, read_command):
    before, up = close_to_writers(home), ["up", "--port-metrics", str(free_port())]
    for command in (["promote", "a/1", "--why", "it is good"], ["lineage", "gc", "--yes"], up):
        result = read_command(home, *command)
        assert result.returncode in (1, 2)
        assert "Traceback" not in result.stderr
        assert str(home) in result.stderr.splitlines()[-1]
    assert files_in(home) == before


def test_reading_makes_no_home(tmp_path, read_command):
    for command in (["status"], ["lineage", "as-of", "2026-11-01"], ["lineage", "export"]):
        assert read_command(tmp_path / "home", *command).returncode == 0
    assert files_in(tmp_path) == []


READ = """
import sys
from contextlib import closing
from pathlib import Path
from ringmaster.model_lineage.sqlite_files import read_only
with closing(read_only(Path(sys.argv[1]))) as connection:
    print([number for (number,) in connection.execute("SELECT number FROM numbers ORDER BY number")])
"""


@pytest.mark.parametrize("state", ["closed", "killed", "open"])
def test_rows_in_a_write_ahead_log_are_read_without_the_right_to_write(tmp_path, state):
    """They are in a log that no process has open any more, too, as after a kill or in a copy."""
    folder = tmp_path / "folder"
    folder.mkdir()
    writer = sqlite3.connect(folder / "some.db")
    writer.execute("PRAGMA journal_mode=WAL")
    with writer:
        writer.execute("CREATE TABLE numbers (number)")
    writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with writer:
        writer.execute("INSERT INTO numbers VALUES (1)")
    if state == "killed":
        log = (folder / "some.db-wal").read_bytes()
        database = (folder / "some.db").read_bytes()
        writer.close()
        (folder / "some.db-wal").write_bytes(log)
        (folder / "some.db").write_bytes(database)
    elif state == "closed":
        writer.close()
    before = close_to_writers(folder)
    result = without_rights(sys.executable, "-c", READ, folder / "some.db")
    assert (result.stdout, result.stderr) == ("[1]\n", "")
    assert files_in(folder) == before
    open_to_writers(folder)
    writer.close()


def test_errors_that_are_no_fault_of_a_disk_or_a_right_are_none():
    assert storage_fault(FileNotFoundError(2, "No such file or directory", "/a")) is None
    assert storage_fault(BrokenPipeError(32, "Broken pipe")) is None


def test_a_full_disk_is_named_with_what_to_do():
    fault = storage_fault(OSError(28, "No space left on device", "/disk/file"))
    assert fault is not None and fault.startswith("/disk/file cannot be written: No space left on device. To fix: free")


def test_a_missing_folder_has_no_runs(tmp_path):
    assert runs_below(tmp_path / "batches", "*/*") == []
