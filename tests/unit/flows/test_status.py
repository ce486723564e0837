"""`ringmaster status` of a home with many batches: it only reads, and one damaged journal hides no other batch."""

import json
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ringmaster.flows import cli
from ringmaster.tasks.storage import database, journal
from ringmaster.tasks.storage.journal import JobStatus, Journal


@pytest.fixture
def home(tmp_path, monkeypatch):
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    return tmp_path


def journal_of(home, batch, run="20261101-120000", jobs=("a",)):
    file = home / "batches" / batch / run / "journal.db"
    written = Journal.of_file(file)
    for name in jobs:
        written.write_job(name, status=JobStatus.DONE, step=7, lead_job="lead", others={"curve": [1.0]})
    written.close()
    return file


def status(*arguments, exit_code=0):
    result = CliRunner().invoke(cli.app, ["status", *arguments])
    assert result.exit_code == exit_code, result.output
    return result


def test_no_database_is_prepared_to_read_the_journals(home, monkeypatch):
    """Preparing one is a synced write: a thousand of them took twelve seconds."""
    journal_of(home, "one", run="20261101-110000", jobs=("old",))
    journal_of(home, "one", jobs=("a", "b"))
    journal_of(home, "two")
    monkeypatch.setattr(database, "create_engine", None)
    rows = json.loads(status("--json").stdout)
    assert [(row["batch"], row["job"], row["status"], row["step"], row["leader"]) for row in rows] == [
        ("one", "a", "done", 7, "lead"),
        ("one", "b", "done", 7, "lead"),
        ("two", "a", "done", 7, "lead"),
    ]
    lines = status().stdout.splitlines()
    assert lines[0].split() == ["batch", "run", "job", "status", "step", "message", "trained", "with"]
    assert [line.split()[0] for line in lines[1:]] == ["one", "one", "two"]


def test_rows_are_those_of_the_journal(home):
    file = journal_of(home, "one", jobs=("a", "b"))
    read = Journal.of_file(file)
    assert journal.jobs_of_file(file) == list(read.jobs().values())
    assert journal.jobs_of_file(file) == list(read.jobs().values())  # while it is open, with a write-ahead log
    read.close()


def test_a_damaged_journal_hides_no_other_batch(home):
    journal_of(home, "damaged").write_bytes(b"no database" * 100)
    journal_of(home, "empty").write_bytes(b"")
    journal_of(home, "good")
    result = status(exit_code=1)
    assert "good" in result.stdout
    assert "journal.db is damaged" in result.stderr


def test_a_running_job_on_a_full_disk_says_why_it_waits(home, monkeypatch):
    file = journal_of(home, "night", jobs=("a",))
    written = Journal.of_file(file)
    written.write_job("b", status=JobStatus.RUNNING, step=3)
    written.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=4096))
    done, runs = json.loads(status("--json").stdout)
    assert done["message"] == ""
    assert runs["message"] == f"waits: the disk of {file.parent} is full. To fix: free space there"
