"""The clock of the planner's time limits, which stops while kernels are compiled.

On a fresh machine, compilation can take longer than planning may, and it happens once. The search must not depend on
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class Clock:
    """Counts the seconds of `now_s`, except those between `stop` and `go_on`.

    Calls of `stop` may be nested and come from any thread.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s, self._lock = now_s, Lock()
        self._num_stops, self._stopped_at_s, self._left_out_s = 0, 0.0, 0.0

    def __call__(self) -> float:
        """Returns seconds since an arbitrary start."""
        with self._lock:
            return (self._stopped_at_s if self._num_stops else self.now_s()) - self._left_out_s

    def stop(self) -> None:
        """Stops the clock."""
        with self._lock:
            if not self._num_stops:
                self._stopped_at_s = self.now_s()
            self._num_stops += 1

    def go_on(self) -> None:
        """Ends one `stop`; the clock resumes when all are ended."""
        with self._lock:
            self._num_stops -= 1
            if not self._num_stops:
                self._left_out_s += self.now_s() - self._stopped_at_s


clock = Clock()
"""The clock of the process, which compiles each kernel once for all its planners."""
