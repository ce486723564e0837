"""The clock that plans are made by: it stands still while kernels are compiled.

That takes longer on a fresh machine than planning may, and happens once: what is searched for must not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class Clock:
    """Seconds of `now_s` but for those between `stop` and `go_on`, which may be nested; from any thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s, self._lock = now_s, Lock()
        self._num_stops, self._stopped_at_s, self._left_out_s = 0, 0.0, 0.0

    def __call__(self) -> float:
        """Seconds since some moment."""
        with self._lock:
            return (self._stopped_at_s if self._num_stops else self.now_s()) - self._left_out_s

    def stop(self) -> None:
        """Stands still from now on."""
        with self._lock:
            if not self._num_stops:
                self._stopped_at_s = self.now_s()
            self._num_stops += 1

    def go_on(self) -> None:
        """Once for each `stop`; the last one makes it go on."""
        with self._lock:
            self._num_stops -= 1
            if not self._num_stops:
                self._left_out_s += self.now_s() - self._stopped_at_s


clock = Clock()
"""Of this process, which compiles a kernel once for all who plan."""
