"""The time budget of a batch's trials: a share of the time that the batch is predicted to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ringmaster.tasks.profiling.search import ConfigSearch
from ringmaster.tasks.profiling.trials import Trial, waves
from ringmaster.techniques import Job

TYPICAL_WAVE_S = 1.5  # the duration of a wave for small models, assumed until a wave was measured


@dataclass(kw_only=True)
class TrialBudget:
    """The time that trials may still take.

    share: the share of the batch's predicted time that trials may take; None for no limit.
    num_devices: the devices on which trials run side by side, in waves.
    batch_s: returns the batch's time as predicted from the present knowledge, None while it is unknown.
    spent_s: the seconds that trials have taken.
    num_waves: the waves of trials so far.
    """

    share: float | None
    num_devices: int
    batch_s: Callable[[], float | None]
    spent_s: float = 0.0
    num_waves: int = 0

    def affordable(self, trials: Sequence[Trial], *, measured: Collection[str]) -> list[Trial]:
        """Returns the trials that fit, those predicted to be fastest first; trials of `measured` jobs come last."""
        batch_s = self.batch_s()
        if self.share is None or batch_s is None:
            return list(trials)
        wave_s = self.spent_s / self.num_waves if self.num_waves else TYPICAL_WAVE_S
        most = int((self.share * batch_s - self.spent_s) / wave_s)
        chosen: list[Trial] = []
        for trial in sorted(trials, key=lambda t: (t.job.name in measured, t.candidate.step_s or 0.0)):
            if len(waves([*chosen, trial], num_devices=self.num_devices)) <= most:
                chosen.append(trial)
        return chosen

    def spend(self, seconds: float, trials: Sequence[Trial]) -> None:
        """Adds the seconds that trials have taken."""
        self.spent_s += seconds
        self.num_waves += len(waves(trials, num_devices=self.num_devices))


def predicted_batch_s(
    jobs: Sequence[Job], searches_of: Mapping[str, Sequence[ConfigSearch]], *, num_devices: int
) -> float | None:
    """Returns the seconds that the jobs take if they fill the devices; None if nothing is known of one of them.

    Each job counts with the option that takes the least device time, measured if possible, or else predicted.
    """
    total_s = 0.0
    for job in jobs:
        seconds = [
            search.num_devices * step_s
            for search in searches_of[job.name]
            if (step_s := search.best_s if search.profiles else search.predicted_s) is not None
        ]
        if searches_of[job.name] and not seconds:
            return None
        total_s += min(seconds, default=0.0) * job.total_steps
    return total_s / num_devices if math.isfinite(total_s) else None
