"""Dates of retraining runs: which run a moment belongs to, and when the run's hours end."""

from datetime import UTC, datetime

import pytest

from ringmaster.tasks.retraining.production import RetrainingEntry
from ringmaster.tasks.retraining.selection import day_text, num_missed


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("starts", "zone", "moment", "run_date"),
    [
        ("00:00", "UTC", "2026-11-20T00:00", "2026-11-20"),
        ("02:00", "UTC", "2026-11-20T01:59", "2026-11-19"),
        ("02:00", "UTC", "2026-11-20T02:00", "2026-11-20"),
        ("22:00", "UTC", "2026-11-21T03:00", "2026-11-20"),
        ("00:00", "Europe/Berlin", "2026-11-20T23:30", "2026-11-21"),
        ("02:00", "America/New_York", "2026-11-20T06:30", "2026-11-19"),
    ],
)
def test_a_moment_belongs_to_the_night_that_started_last(starts, zone, moment, run_date):
    assert RetrainingEntry(starts=starts, timezone=zone).run_date_of(at(moment)) == run_date


@pytest.mark.parametrize(
    ("starts", "deadline", "zone", "ends"),
    [
        ("02:00", "06:00", "UTC", "2026-11-20T06:00"),
        ("22:00", "06:00", "UTC", "2026-11-21T06:00"),
        ("22:00", "22:00", "UTC", "2026-11-21T22:00"),
        ("02:00", "06:00", "Europe/Berlin", "2026-11-20T05:00"),
    ],
)
def test_a_night_ends_at_the_first_deadline_after_its_start(starts, deadline, zone, ends):
    assert RetrainingEntry(starts=starts, deadline=deadline, timezone=zone).deadline_of("2026-11-20") == at(ends)


def test_a_night_in_which_clocks_change_has_its_deadline_by_the_clock_on_the_wall():
    hours = RetrainingEntry(starts="02:00", deadline="06:00", timezone="Europe/Berlin")
    assert hours.deadline_of("2026-10-25") == at("2026-10-25T05:00")
    assert hours.deadline_of("2026-03-29") == at("2026-03-29T04:00")


def test_without_a_deadline_a_night_takes_as_long_as_it_takes():
    assert RetrainingEntry().deadline_of("2026-11-20") is None


@pytest.mark.parametrize(
    ("run_date", "before", "missed"),
    [
        ("2026-11-20", None, 0),
        ("2026-11-20", "2026-11-19", 0),
        ("2026-11-20", "2026-11-17", 2),
        ("2026-11-20", "2026-11-20", 0),
    ],
)
def test_nights_that_were_missed_are_counted(run_date, before, missed):
    assert num_missed(run_date, before) == missed


def test_a_moment_is_told_in_utc():
    assert day_text(at("2026-11-20T02:03")) == "2026-11-20 02:03"
