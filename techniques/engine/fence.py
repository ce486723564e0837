"""A dead-man's switch, for owners that may be cut off or frozen while others take their place.

The owner tells the fork server, in *ticks*, at which moments it was known to be in its place. Some seconds after the
last of them the fork server ends all that it started. So whoever waits longer than that before it gives the owner's
devices and jobs to others knows that nobody is left on them; no two clocks have to be compared.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable

TICK = struct.Struct("d")
"""What an owner writes: a moment, by `seconds_since_boot`."""


def seconds_since_boot() -> float:
    """One clock for all processes of a machine. It counts the seconds during which the machine slept, too: what was
    given to others meanwhile is theirs when it wakes.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Whether more than `after_s` seconds have passed since the owner was known to be in its place."""

    def __init__(self, after_s: float, *, clock: Callable[[], float] = seconds_since_boot) -> None:
        self._after_s, self._clock = after_s, clock
        self._heard_s = clock()

    def tick(self, ticks: bytes) -> None:
        """Takes what the owner has written."""
        for (moment_s,) in TICK.iter_unpack(ticks):
            self._heard_s = max(self._heard_s, moment_s)

    def is_closed(self) -> bool:
        """Whether nobody must run any more."""
        return self._clock() - self._heard_s >= self._after_s

    def wait_ms(self) -> int | None:
        """How long to wait for the owner before looking again; None for as long as it takes.

        A second at most, as `poll` does not count sleep; nothing changes by itself once the fence is closed.
        """
        left_s = self._heard_s + self._after_s - self._clock()
        return None if math.isinf(left_s) or left_s <= 0 else math.ceil(1000 * min(left_s, 1.0))
