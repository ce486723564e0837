"""How much other work slows a process down, by what the kernel counts of the time that its threads wait for a core.

Of the time for which a thread is ready, it runs C seconds and waits W seconds for a core. Its load is (C + W) / C: how
many times as long its work takes as on cores of its own. The time in which it is blocked does not count. A rank that is
blocked waits for other ranks, which are as slow as it is; so the load also applies to that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

MAX_LOAD = 100.0
MIN_RUN_NS = 1_000_000  # in which a thread has to run, so that its load is known


class CoreLoad:
    """The load of this process, by the thread that runs most.

    folder: of the process's threads in /proc.
    """

    def __init__(self, folder: Path = Path("/proc/self/task")) -> None:
        self._folder = folder
        self._before = self._counts()

    def since_last(self) -> float | None:
        """Returns the load since the last call; None where the kernel does not count, or hardly anything has run."""
        now, before = self._counts(), self._before
        self._before = now
        spans = [(run - before[name][0], wait - before[name][1]) for name, (run, wait) in now.items() if name in before]
        run_ns, wait_ns = max(spans, default=(0, 0))
        return min((run_ns + max(wait_ns, 0)) / run_ns, MAX_LOAD) if run_ns >= MIN_RUN_NS else None

    def _counts(self) -> Mapping[str, tuple[int, int]]:
        """Returns for how many nanoseconds each thread has run, and has waited for a core, so far."""
        counts = {}
        for file in self._folder.glob("*/schedstat"):
            try:
                run_ns, wait_ns, _ = file.read_text().split()
            except (OSError, ValueError):  # the thread has ended, or the kernel does not count
                continue
            counts[file.parent.name] = int(run_ns), int(wait_ns)
        return counts
