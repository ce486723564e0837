"""Dates and deadlines of retraining runs, as pure functions of a given time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

Clock = Callable[[], float]
"""Returns the time in seconds since the epoch, as `time.time` does; tests and demonstrations pass their own."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """The schedule of retraining runs, in local times such as "22:00" of `timezone`.

    starts: when a run starts; its date identifies the run.
    deadline: a run ends at the first deadline after its start; None for no deadline.

    A moment between a run's deadline and the next start still belongs to that run, but is too late for training.
    """

    starts: str = "00:00"
    deadline: str | None = None
    timezone: str = "UTC"

    def run_date_of(self, now_s: float) -> str:
        """Returns the date of the run that started last, in ISO format such as "2026-11-20"."""
        local = datetime.fromtimestamp(now_s, UTC).astimezone(ZoneInfo(self.timezone))
        day = local.date()
        return (day if local.time() >= time.fromisoformat(self.starts) else day - timedelta(days=1)).isoformat()

    def deadline_of(self, run_date: str) -> float | None:
        """Returns the deadline of a run in seconds since the epoch, or None if there is no deadline."""
        if self.deadline is None:
            return None
        zone, day = ZoneInfo(self.timezone), date.fromisoformat(run_date)
        start = datetime.combine(day, time.fromisoformat(self.starts), zone)
        end = datetime.combine(day, time.fromisoformat(self.deadline), zone)
        if end <= start:
            end = datetime.combine(day + timedelta(days=1), time.fromisoformat(self.deadline), zone)
        return end.timestamp()

    def next_in_time(self, now_s: float) -> str:
        """Returns the date of the first run whose deadline has not passed."""
        run_date = self.run_date_of(now_s)
        deadline_s = self.deadline_of(run_date)
        is_late = deadline_s is not None and deadline_s <= now_s
        return (date.fromisoformat(run_date) + timedelta(days=int(is_late))).isoformat()


def num_missed(run_date: str, before: str | None) -> int:
    """Returns the number of runs missed between two run dates; 0 if there is no run before."""
    if before is None:
        return 0
    return max(0, num_days(before, run_date) - 1)


def num_days(since: str, until: str) -> int:
    """Returns the number of days between two run dates, whatever the times of day of the runs."""
    return (date.fromisoformat(until) - date.fromisoformat(since)).days


def day_text(moment_s: float) -> str:
    """Formats a time for display, in UTC: "2026-11-20 02:00"."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M")
