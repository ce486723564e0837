"""What a running segment tells of itself: how far it is, and how long its steps take."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.execution.dispatch import PlannedSegment

FEWEST_STEPS = 3  # before a speed is believed; the first step, which warms up, is none of them
MOST_STEPS = 100  # that a speed is measured by: the newest ones


@dataclass
class RunningSegment:
    """A segment whose gang runs: `ordered_step` is where it will end by itself, `segment.last_step` where it shall.

    names: of the leases. first_step: from which it was started; step: up to which it has told that it is.
    is_over_end: it has come to its planned end and goes on while nobody waits. is_stopping: it was told to stop.
    """

    segment: PlannedSegment
    names: tuple[str, ...]
    first_step: int
    folder: str = ""
    ordered_step: int = 0
    step: int = 0
    is_ready: bool = False
    is_over_end: bool = False
    is_stopping: bool = False
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    _is_warm: bool = False

    def hear(self, event: Mapping[str, Any]) -> None:
        """Takes in what its gang says."""
        if event["event"] == "ready":
            self.is_ready, self.step = True, max(self.step, event["step"])
        elif event["event"] == "steps":
            seconds = list(event["seconds"])
            self._steps_s.extend(seconds if self._is_warm else seconds[1:])
            self._is_warm = self.is_ready = True
            self.step = max(self.step, event["first_step"] + len(seconds))

    @property
    def step_s(self) -> float | None:
        """Median seconds of its newest steps, None while they are too few to tell."""
        return statistics.median(self._steps_s) if len(self._steps_s) >= FEWEST_STEPS else None
