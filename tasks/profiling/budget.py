"""How long a batch may be measured: a share of the time that it is predicted to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ringmaster.tasks.profiling.search import Search
from ringmaster.tasks.profiling.trials import Trial, waves
from ringmaster.techniques import Job

TYPICAL_WAVE_S = 1.5  # of small models, until a wave was measured


@dataclass(kw_only=True)
class TrialBudget:
    """What trials may still cost.

    share: of the batch's predicted time; None for as many trials as are worth having. num_devices: on which trials run
    side by side, in waves. batch_s: tells the predicted time by what is known so far, None while it is unknown.
    """

    share: float | None
    num_devices: int
    batch_s: Callable[[], float | None]
    spent_s: float = 0.0
    num_waves: int = 0

    def affordable(self, trials: Sequence[Trial], *, measured: Collection[str]) -> list[Trial]:
        """Those that fit, what is predicted to be quickest first, but for jobs that were measured, which come last."""
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
        """Notes what trials have cost."""
        self.spent_s += seconds
        self.num_waves += len(waves(trials, num_devices=self.num_devices))


def predicted_batch_s(
    jobs: Sequence[Job], searches_of: Mapping[str, Sequence[Search]], *, num_devices: int
) -> float | None:
    """Seconds that the jobs would take if they filled the devices; None where nothing is known of one of them.

    Of each job the option that takes the least device time, as far as it was measured, or else predicted.
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
