"""The progress of a running segment as its gang reports it: the current step and the seconds of a step."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.techniques import Profile
from ringmaster.techniques.runtime.processes.events import Event, JobEvent, Ready, Steps

FEWEST_STEPS = 3  # before a speed is used; the first step, which warms up, does not count
USUAL_DEVIATION = 0.1  # of the seconds of single steps, relative to their mean
MOST_STEPS = 100  # the newest steps, over which a speed is measured


def is_about(event: Event, job: str) -> bool:
    """Whether a gang's event concerns `job`.

    Events about other jobs that the gang trains carry those jobs' names within the batch.
    """
    named = event.job if isinstance(event, JobEvent) else None
    return named is None or named == job.rpartition("/")[2]


def step_told(event: Event) -> int | None:
    """Returns the step that a job has reached according to an event, None if the event does not say."""
    return event.step if isinstance(event, (Ready, Steps)) else None


@dataclass
class RunningSegment:
    """A segment whose gang runs.

    segment: its `last_step` is where it should end by the plan.
    profile: the profile of the option under which it runs.
    names: the names of its leases.
    first_step: the step at which it was started.
    number: its number in the journal.
    ordered_step: the step at which its gang ends without further commands.
    step: the step that it has reported.
    is_ready: whether its gang has reported that it trains.
    is_over_end: whether it has reached its planned end and goes on as no segment waits for its devices.
    is_stopping: whether it was commanded to stop.
    beside: the other jobs that its gang trains, with the step from which.
    members: those of them that have not ended.
    told: the steps that members have reported.
    refusal: why the gang is stopped and its job fails: what is wrong with an event that it has reported.
    """

    segment: PlannedSegment
    profile: Profile
    names: tuple[str, ...]
    first_step: int
    number: int = 0
    ordered_step: int = 0
    step: int = 0
    is_ready: bool = False
    is_over_end: bool = False
    is_stopping: bool = False
    beside: Mapping[str, int] = field(default_factory=dict)
    members: set[str] = field(init=False)
    told: dict[str, int] = field(default_factory=dict)
    refusal: str = ""
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    _mean_s: float | None = None  # of `_steps_s`, once it was asked for
    _is_warm: bool = False

    def __post_init__(self) -> None:
        self.members = set(self.beside)

    def may_go_on(self, last_step: int) -> bool:
        """Whether its gang can be commanded to end at `last_step`.

        A gang whose jobs take turns knows only the steps that it was ordered.
        """
        return self.profile.at_once is None or last_step <= self.ordered_step

    @property
    def jobs(self) -> set[str]:
        """All jobs that its gang trains."""
        return {self.segment.job, *self.members}

    def hear(self, event: Event) -> None:
        """Takes in an event of its gang about its own job."""
        if (step := step_told(event)) is None:
            return
        self.is_ready, self.step = True, max(self.step, step)
        if isinstance(event, Steps):
            self._steps_s.extend(event.seconds if self._is_warm else event.seconds[1:])
            self._mean_s = None
            self._is_warm = True

    def hear_of(self, member: str, event: Event) -> None:
        """Takes in an event of its gang about a member."""
        if (step := step_told(event)) is not None:
            self.told[member] = max(self.told.get(member, 0), step)

    def step_of(self, member: str) -> int:
        """Returns a member's step as far as it is known. Members that are all trained at once advance together."""
        ahead = self.step - self.first_step if self.profile.at_once is None else 0
        return max(self.told.get(member, 0), self.beside[member] + ahead)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of its newest steps, None if there are fewer than `FEWEST_STEPS`.

        Not the median: of short steps on a busy machine, few contain all the time that other processes take.
        """
        if self._mean_s is None and len(self._steps_s) >= FEWEST_STEPS:
            self._mean_s = statistics.fmean(self._steps_s)
        return self._mean_s

    @property
    def step_error(self) -> float:
        """The standard error of `step_s`, relative to it: steps of uneven widths take unequal seconds.

        A handful of steps says little of how much they differ: `USUAL_DEVIATION` counts as `FEWEST_STEPS` of them.
        """
        mean_s, num_steps = self.step_s, len(self._steps_s)
        if not mean_s:
            return USUAL_DEVIATION
        squares = FEWEST_STEPS * USUAL_DEVIATION**2 + sum((step_s / mean_s - 1) ** 2 for step_s in self._steps_s)
        return math.sqrt(squares / (FEWEST_STEPS + num_steps - 1) / num_steps)
