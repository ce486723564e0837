"""A clock for durations: seconds since the epoch that no correction of the system's clock moves."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
AHEAD_S = "ahead_s"  # in a record: how far the clock is ahead of the machine's wall clock


def boot_s() -> float:
    """Returns the seconds since the system's boot, also those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """The wall clock as it was once, counted on by the time since the system's boot.

    Differences of its values are durations, and never negative. Deadlines in hours of the day follow `time.time`.

    not_before_s: a time that was recorded before, after which this clock begins, if the wall clock was set back since.
    """

    def __init__(
        self,
        *,
        not_before_s: float = 0.0,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = boot_s,
    ) -> None:
        self._clock = clock
        self._epoch_s = max(wall_clock(), not_before_s) - clock()

    def __call__(self) -> float:
        """Returns seconds since the epoch."""
        return self._epoch_s + self._clock()

    def to_json(self) -> dict[str, Any]:
        """Returns what other processes of this machine need to read the same times until its next boot."""
        return {"boot_id": BOOT_ID.read_text().strip(), "epoch_s": self._epoch_s}


def is_of_this_boot(record: Mapping[str, Any]) -> bool:
    """Returns whether a clock was recorded on this machine, since its boot."""
    return bool(record["boot_id"] == BOOT_ID.read_text().strip())


def clock_of_record(record: Mapping[str, Any] | None) -> Callable[[], float]:
    """Returns the clock that another process has recorded; the wall clock where none has.

    On another machine or since another boot, it is the wall clock, put forward as far as the record says.
    """
    if record is None:
        return time.time
    if not is_of_this_boot(record):
        return lambda: time.time() + float(record.get(AHEAD_S, 0.0))
    return SteadyClock(wall_clock=lambda: record["epoch_s"] + boot_s())
