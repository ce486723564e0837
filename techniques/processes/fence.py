"""A dead man's switch, for owners that may be cut off or frozen while others take over their devices.

The owner sends *ticks* to the fork server: moments at which it was known to own its devices. Some seconds after the
last of these moments, the fork server kills all processes that it started. If another process waits longer than that
before it reassigns the owner's devices and jobs, no process of the owner uses them any more. Clocks of two machines
need not be compared.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable

TICK = struct.Struct("d")
"""The format of a tick: a moment, by `seconds_since_boot`."""


def seconds_since_boot() -> float:
    """Returns seconds on a clock that all processes of a machine share.

    The clock also runs while the machine is suspended, as others may take over its devices meanwhile.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Decides whether more than `after_s` seconds have passed since the owner was known to own its devices."""

    def __init__(self, after_s: float, *, clock: Callable[[], float] = seconds_since_boot) -> None:
        self._after_s, self._clock = after_s, clock
        self._heard_s = clock()

    def tick(self, ticks: bytes) -> None:
        """Reads the ticks that the owner has sent."""
        for (moment_s,) in TICK.iter_unpack(ticks):
            self._heard_s = max(self._heard_s, moment_s)

    def is_closed(self) -> bool:
        """Returns whether no process of the owner may run any more."""
        return self._clock() - self._heard_s >= self._after_s

    def wait_ms(self) -> int | None:
        """Returns how long to wait for the owner before checking again, in milliseconds; None for no limit.

        The limit is one second, as `poll` does not count the time while the machine is suspended. A closed fence needs
        no further checks until a tick arrives.
        """
        left_s = self._heard_s + self._after_s - self._clock()
        return None if math.isinf(left_s) or left_s <= 0 else math.ceil(1000 * min(left_s, 1.0))
