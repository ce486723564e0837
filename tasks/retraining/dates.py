"""Which night a moment belongs to, and when that night ends. No clock is read here: a moment is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

Clock = Callable[[], float]
"""Tells the moment in seconds since the epoch, as `time.time` does; tests and demonstrations give one of their own."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """When nights are. starts, deadline: local times such as "22:00" in `timezone`; no deadline: as long as it takes.

    A night is called by the date on which it starts, and it ends at the first deadline after that. What comes between
    its deadline and the next start still belongs to it, but too late to train anything.
    """

    starts: str = "00:00"
    deadline: str | None = None
    timezone: str = "UTC"

    def night_of(self, now_s: float) -> str:
        """The night that started last, as an ISO date such as "2026-11-20"."""
        local = datetime.fromtimestamp(now_s, UTC).astimezone(ZoneInfo(self.timezone))
        day = local.date()
        return (day if local.time() >= time.fromisoformat(self.starts) else day - timedelta(days=1)).isoformat()

    def deadline_of(self, night: str) -> float | None:
        """When a night has to be over, in seconds since the epoch; None where nothing says so."""
        if self.deadline is None:
            return None
        zone, day = ZoneInfo(self.timezone), date.fromisoformat(night)
        start = datetime.combine(day, time.fromisoformat(self.starts), zone)
        end = datetime.combine(day, time.fromisoformat(self.deadline), zone)
        if end <= start:
            end = datetime.combine(day + timedelta(days=1), time.fromisoformat(self.deadline), zone)
        return end.timestamp()


def num_missed(night: str, before: str | None) -> int:
    """How many nights there should have been between two, and were not; none where there is no night before."""
    if before is None:
        return 0
    return max(0, num_days(before, night) - 1)


def num_days(since: str, until: str) -> int:
    """The days from one night to another, by their dates: it matters not at which moment each began."""
    return (date.fromisoformat(until) - date.fromisoformat(since)).days


def day_text(moment_s: float) -> str:
    """A moment for people, in UTC: "2026-11-20 02:00"."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M")
