"""A SQLite file on a full disk: writers wait with one message, and continue once there is space or give up."""

import errno
import threading
from contextlib import closing

import pytest

from ringmaster.tasks.storage import database as storage
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobStatus, Journal, jobs_of_file
from tests.readers import small_disk

BIG = "x" * 100_000


@pytest.fixture
def disk(tmp_path):
    """A disk on which a journal has room for some writes."""
    with small_disk(tmp_path / "disk", size="1m") as folder:
        yield folder


def fill(folder):
    with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


def test_a_write_waits_with_one_message_and_goes_on_once_there_is_space(disk):
    messages, is_told = [], threading.Event()

    def notice(text):
        messages.append(text)
        is_told.set()

    journal = Journal.of_file(disk / "journal.db", notice=notice)
    fill(disk)
    writer = threading.Thread(target=journal.put, args=("fact", BIG))
    writer.start()
    assert is_told.wait(60)
    (disk / "filler").unlink()
    writer.join(60)
    assert journal.get("fact") == BIG
    full, again = messages
    assert full.startswith(f"{disk / 'journal.db'} cannot be written: database or disk is full. The run waits")
    assert "To fix: free space" in full and again == f"{disk / 'journal.db'} can be written again"
    journal.close()


def test_after_the_limit_the_error_is_that_of_the_disk_and_nothing_waits_any_more(disk, monkeypatch):
    journal = Journal.of_file(disk / "journal.db", timeout_s=0.0, notice=lambda _: None)
    fill(disk)
    with pytest.raises(OSError, match=r"No space left on device: .*journal.db") as caught:
        journal.put("fact", BIG)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(storage.Database, "_wait", None)
    with pytest.raises(OSError, match="No space left on device"):
        journal.put("fact", BIG)
    journal.close()


def test_a_stop_ends_the_wait(disk):
    is_told = threading.Event()
    journal = Journal.of_file(disk / "journal.db", notice=lambda _: is_told.set())
    fill(disk)
    errors = []

    def write():
        try:
            journal.put("fact", BIG)
        except OSError as error:
            errors.append(error.errno)

    writer = threading.Thread(target=write)
    writer.start()
    assert is_told.wait(60)
    journal.database.hurry(0.0)
    writer.join(60)
    assert errors == [errno.ENOSPC]
    journal.close()


def test_the_records_of_a_run_that_has_ended_can_be_read(disk):
    with closing(Journal.of_file(disk / "journal.db")) as journal:
        journal.write_job("a", status=JobStatus.DONE, step=3)
    fill(disk)
    for _ in range(2):  # the first one leaves what SQLite could not finish there
        (record,) = jobs_of_file(disk / "journal.db")
        assert (record.name, record.step) == ("a", 3)
    with closing(Database(file_url(disk / "journal.db"), timeout_s=0.0, is_reader=True)) as database:
        assert Journal(database, batch="").jobs()["a"].step == 3
