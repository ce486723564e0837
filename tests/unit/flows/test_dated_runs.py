"""Runs are in the order in which they were made, whatever the clock and the time zone say."""

import time
from datetime import UTC, datetime

import pytest

from ringmaster.flows import dated_runs
from ringmaster.flows.dated_runs import in_order, runs_below, stamped_folder
from ringmaster.flows.reports.watch import newest_run


@pytest.fixture
def zone(monkeypatch):
    def move_to(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield move_to
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def clock(monkeypatch):
    """Sets the time in UTC."""

    def set_to(text):
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.fromisoformat(text).replace(tzinfo=UTC).astimezone(tz)

        monkeypatch.setattr(dated_runs, "datetime", Clock)

    return set_to


def made(parent, num=1):
    runs = [stamped_folder(parent) for _ in range(num)]
    for run in runs:
        (run / "journal.db").touch()
    return runs


def test_runs_of_two_time_zones_are_in_the_order_of_their_start(tmp_path, zone):
    runs = []
    for name in ("Asia/Tokyo", "UTC", "America/Los_Angeles", "Asia/Tokyo"):
        zone(name)
        runs += made(tmp_path / "batches" / "nightly")
    assert runs_below(tmp_path / "batches" / "nightly") == runs
    assert newest_run(tmp_path / "batches", "nightly") == runs[-1]


def test_the_hour_that_comes_twice_in_autumn_comes_once(tmp_path, zone, clock):
    zone("Europe/Berlin")
    runs = []
    for text in ("2026-10-25T00:50:00", "2026-10-25T01:10:00"):
        clock(text)
        runs += made(tmp_path / "batches" / "nightly")
    assert [run.name for run in runs] == ["20261025-005000", "20261025-011000"]


def test_the_tenth_run_of_a_second_comes_after_the_second(tmp_path, clock):
    clock("2026-11-20T12:00:00")
    runs = made(tmp_path / "batches" / "nightly", num=12)
    assert runs[9].name == "20261120-120000-10"
    assert in_order(reversed(runs)) == runs_below(tmp_path / "batches" / "nightly") == runs


def test_a_clock_that_is_set_back_and_a_folder_of_local_time_do_not_hide_a_new_run(tmp_path, clock):
    older = tmp_path / "batches" / "weekly" / "20261121-093000"  # of a release that wrote the time of Tokyo
    older.mkdir(parents=True)
    (older / "journal.db").touch()
    clock("2026-11-21T00:31:00")
    first = made(tmp_path / "batches" / "nightly")
    clock("2026-11-20T12:00:00")
    second = made(tmp_path / "batches" / "nightly")
    assert runs_below(tmp_path / "batches", "*/*") == [older, *first, *second]
    assert newest_run(tmp_path / "batches", None) == second[0]


def test_other_files_beside_runs_are_no_runs(tmp_path, clock):
    clock("2026-11-20T12:00:00")
    (tmp_path / "batches" / "nightly" / "submitted-9").mkdir(parents=True)
    assert stamped_folder(tmp_path / "batches" / "nightly").name == "20261120-120000"
