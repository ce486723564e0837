"""What a running segment tells of itself: how far it is, and how long its steps take."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.techniques import Profile

FEWEST_STEPS = 3  # before a speed is believed; the first step, which warms up, is none of them
MOST_STEPS = 100  # that a speed is measured by: the newest ones


def is_about(event: Mapping[str, Any], job: str) -> bool:
    """Whether a gang's word is about this job, and not about one that it trains beside it, which it calls by name."""
    local = job.rpartition("/")[2]
    return bool(event.get("job", local) == local)


def step_told(event: Mapping[str, Any]) -> int | None:
    """Up to which step a job is by what its gang says, None where it says nothing of that."""
    if event["event"] == "ready":
        return int(event["step"])
    return int(event["first_step"]) + len(event["seconds"]) if event["event"] == "steps" else None


@dataclass
class RunningSegment:
    """A segment whose gang runs: `ordered_step` is where it will end by itself, `segment.last_step` where it shall.

    profile: of the option that it runs under. beside: the jobs that its gang trains beside its own, and the step from
    which; fellows: those of them that are not through yet; told: up to which step they have said that they are. names:
    of the leases. first_step: from which it was started; step: up to which it has told that it is. is_over_end: it has
    come to its planned end and goes on while nobody waits. is_stopping: it was told to stop.
    """

    segment: PlannedSegment
    profile: Profile
    names: tuple[str, ...]
    first_step: int
    folder: str = ""
    ordered_step: int = 0
    step: int = 0
    is_ready: bool = False
    is_over_end: bool = False
    is_stopping: bool = False
    beside: Mapping[str, int] = field(default_factory=dict)
    fellows: set[str] = field(init=False)
    told: dict[str, int] = field(default_factory=dict)
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    _is_warm: bool = False

    def __post_init__(self) -> None:
        self.fellows = set(self.beside)

    def may_go_on(self, last_step: int) -> bool:
        """Whether its gang can be told to end there: one whose jobs take turns has none but those it was given."""
        return self.profile.at_once is None or last_step <= self.ordered_step

    @property
    def jobs(self) -> set[str]:
        """All that its gang trains."""
        return {self.segment.job, *self.fellows}

    def hear(self, event: Mapping[str, Any]) -> None:
        """Takes in what its gang says."""
        if (step := step_told(event)) is None:
            return
        self.is_ready, self.step = True, max(self.step, step)
        if event["event"] == "steps":
            seconds = list(event["seconds"])
            self._steps_s.extend(seconds if self._is_warm else seconds[1:])
            self._is_warm = True

    def hear_of(self, fellow: str, event: Mapping[str, Any]) -> None:
        """Takes in what its gang says of a fellow."""
        if (step := step_told(event)) is not None:
            self.told[fellow] = max(self.told.get(fellow, 0), step)

    def step_of(self, fellow: str) -> int:
        """Up to which step a fellow is, as far as is known: those that are all trained at once keep step."""
        ahead = self.step - self.first_step if self.profile.at_once is None else 0
        return max(self.told.get(fellow, 0), self.beside[fellow] + ahead)

    @property
    def step_s(self) -> float | None:
        """Median seconds of its newest steps, None while they are too few to tell."""
        return statistics.median(self._steps_s) if len(self._steps_s) >= FEWEST_STEPS else None
